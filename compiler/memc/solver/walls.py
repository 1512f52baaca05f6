"""What stands in the way, said with its figures: states, the vocabulary, the host."""

from __future__ import annotations

import re
from dataclasses import replace

from memc.config import Engine, LossHead, TrainingConfig
from memc.ledger.entries import Account, Entry, Ledger, Moment
from memc.solver.search import Machine
from memc.units import format_gib

_STATES = (Account.PARAMETERS, Account.MASTER_WEIGHTS, Account.GRADIENTS, Account.OPTIMIZER_STATES)
_NOTABLE_LOGITS_SHARE = 0.1
_LISTED = 4
_LARGE = re.compile(r"\b(\d{7,}) B\b")
_SHAPES = re.compile(r"; B (\d+), T (\d+)(?:, r \d+)?$")


def in_words(entry: Entry) -> str:
    """Returns how an entry comes about: its formula with GiB for bytes and words for shape variables."""
    text = _LARGE.sub(lambda found: format_gib(int(found[1])), entry.formula)
    return _SHAPES.sub(lambda found: f", at a micro-batch of {found[1]} x {int(found[2]):,} tokens", text)


def states_wall(machine: Machine) -> list[str]:
    """Returns what weights, gradients and states take as asked, and how much of that sharding leaves on each GPU.

    Said where several GPUs share a run whose states do not fit on one.
    """
    asked, budget = machine.question.asked, machine.question.budget
    if asked.world_size == 1:
        return []
    unsharded = replace(asked, engine=Engine.DDP, zero=None, fsdp=None)
    accounts = machine.estimator.ledger(unsharded).gpu.by_account(Moment.STEP)
    whole = sum(accounts[account] for account in _STATES)
    if whole <= budget.gpu_bytes:
        return []
    share = whole // asked.world_size
    rest = budget.gpu_bytes - share
    left = (
        f"leaves {format_gib(rest)} of the budget for activations and buffers" if rest > 0 else "is too much by itself"
    )
    return [
        f"weights, gradients and optimizer states are {format_gib(whole)} together: no GPU holds them whole; divided "
        f"by {asked.world_size} they are {format_gib(share)} on each, which {left}"
    ]


def loss_wall(machine: Machine, config: TrainingConfig) -> list[str]:
    """Returns what the vocabulary costs where its logits are a notable part of the card."""
    vocabulary = machine.question.model.vocab_size
    copy = 4 * config.micro_batch_tokens * vocabulary
    if copy < _NOTABLE_LOGITS_SHARE * machine.question.budget.gpu_bytes:
        return []
    chunked = config.loss is LossHead.CHUNKED
    other = replace(config, loss=LossHead.PLAIN if chunked else LossHead.CHUNKED)
    ours, theirs = (machine.estimator.price(item).gpu_required_bytes for item in (config, other))
    logits = f"one fp32 copy of the logits ({config.micro_batch_tokens:,} tokens x {vocabulary:,} words) is "
    if chunked and theirs > ours:
        return [
            f"the vocabulary would be the wall: {logits}{format_gib(copy)}, and the plain loss, which holds several, "
            f"needs {format_gib(theirs - ours)} more; the chunked loss never holds one"
        ]
    if not chunked and ours > theirs:
        return [
            f"the loss is the wall: {logits}{format_gib(copy)}, and the plain loss holds several; the chunked loss "
            f"needs {format_gib(ours - theirs)} less"
        ]
    return []


def host_wall(machine: Machine, ledger: Ledger) -> list[str]:
    """Returns what fills the host where it, and not the card, is what a run could grow out of."""
    budget, host = machine.question.budget, ledger.host
    moments = [moment for moment in Moment if moment is not Moment.RESUME]
    moment = max(moments, key=lambda item: host.by_moment[item])
    used = host.by_moment[moment]
    if not budget.host_bytes or used / budget.host_bytes <= ledger.gpu.required_bytes / budget.gpu_bytes:
        return []
    alive = sorted((entry for entry in host.entries if moment in entry.moments), key=lambda entry: -entry.bytes)
    parts = ", ".join(f"{entry.name} {format_gib(entry.bytes)}" for entry in alive[:_LISTED])
    return [
        f"the host binds before the card: {used / budget.host_bytes:.0%} of its memory is used and "
        f"{ledger.gpu.required_bytes / budget.gpu_bytes:.0%} of the GPU's; in phase {moment.phase} it holds {parts}"
    ]
