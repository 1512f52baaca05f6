"""Figures and entries of a ledger, found by the neutral names that reports give them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from memc.config import LossHead
from memc.ladder import LADDER
from memc.ledger import Ledger
from memc.ledger.entries import Account, Entry, Moment, Phase, ResourceLedger

from reported.answers import Answers, Asked

_STATES = (Account.PARAMETERS, Account.MASTER_WEIGHTS, Account.GRADIENTS, Account.OPTIMIZER_STATES)
_ENTRY_WORDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("optimizer_step", "step_transient", "foreach"), r"foreach|step-|flat-copies|sub-group"),
    (("bucket", "communication"), r"bucket"),
    (("leaf", "gathered"), r"gathered"),
    (("swap", "pinned"), r"nvme-.*buffers|offload.*buffer|offloaded-gradients"),
    (("logits", "loss"), r"logits|loss"),
    (("checkpoint",), r"layer-checkpoints|layer-activations"),
    (("kv",), r"kv"),
    (("dequant",), r"dequantized"),
    (("eval",), r"evaluation"),
    (("context",), r"cuda-context"),
    (("nccl",), r"nccl"),
    (("adapter", "lora"), r"adapter"),
    (("quant",), r"4bit"),
)


_EMPTY_WORDS = {
    *("per", "gpu", "card", "rank", "rank0", "total", "node", "gib", "gb", "byte", "peak", "host", "size", "of", "the"),
    *("extra", "line", "buffer", "memory", "with", "and", "in", "on", "at", "full", "one"),
}


def entries_called(bill: ResourceLedger, item: str) -> list[Entry] | None:
    """Returns the entries that a report's name means; None when nothing is known to mean them."""
    name = item.lower().replace("-", "_")
    for words, pattern in _ENTRY_WORDS:
        if any(word in name for word in words):
            return [entry for entry in bill.entries if re.search(pattern, entry.name)]
    exact = [entry for entry in bill.entries if entry.name.replace("-", "_") in name]
    if exact:
        return exact
    said = {word.rstrip("s") for word in re.findall(r"[a-z0-9]+", name)} - _EMPTY_WORDS
    return [entry for entry in bill.entries if said & {word.rstrip("s") for word in entry.name.split("-")}] or None


def gpu_figure(answers: Answers, item: str) -> int | None:
    """Returns the bytes that an item of a report's ledger means, of one GPU unless it says host; None when unknown."""
    asked = answers.asked
    ledger = None if asked is None else _ledger(asked, answers.open, item)
    if asked is None or ledger is None:
        return None
    name, gpu = item.lower(), ledger.gpu
    if re.search(r"\bhost|host_|_host|cpu_ram|\bram\b", name):
        return host_figure(answers, item)
    if "nvme" in name or "disk" in name:
        return ledger.nvme.required_bytes
    for words, figure in _FIGURES:
        if all(re.search(word, name) for word in words):
            return figure(asked, ledger)
    found = entries_called(gpu, item)
    return None if found is None else sum(entry.bytes for entry in found)


def _refused_ledger(free: Asked, stage: int) -> Ledger | None:
    """Returns the bill of a stage of ZeRO that memc refuses for the run: it prices what it does not plan."""
    machine = free.machine
    technique = next((technique for technique in LADDER if technique.name == f"zero-{stage}"), None)
    if machine is None or technique is None:
        return None
    return machine.estimator.ledger(technique.apply(machine.question.asked, machine.question.situation))


def _ledger(asked: Asked, free: Asked | None, item: str) -> Ledger | None:
    """Returns the bill of the run as asked; under the sharding that the item's name ends in, where that is another."""
    named = re.search(r"(zero)_?([123])|(fsdp)", item.lower())
    machine = asked.machine
    if machine is None and free is not None and named is not None:  # refused for the sharding that the item names
        return _refused_ledger(free, int(named.group(2) or 0))
    if machine is None or named is None:
        return asked.ledger
    wanted = "fsdp" if named.group(3) else f"zero-{named.group(2)}"
    question = machine.question
    technique = next(technique for technique in LADDER if technique.name == wanted)
    if technique.why_not(question.asked, question.situation) is not None:
        return asked.ledger
    return machine.estimator.ledger(technique.apply(question.asked, question.situation))


def host_figure(answers: Answers, item: str) -> int | None:
    """Returns the bytes of the host that an item means, all ranks of a node together; None when unknown."""
    asked = answers.asked
    ledger = None if asked is None else asked.ledger
    if ledger is None:
        return None
    name, host = item.lower(), ledger.host
    if "save" in name:
        return _largest(host, Phase.SAVE, lambda entry: Moment.SAVE in entry.moments and "sav" in entry.name)
    if "wrong_order" in name:  # every rank holds what one holds when the shards come too late
        one = next((entry.bytes for entry in host.entries if entry.name == "checkpoint-in-memory"), 0)
        machine = asked.machine if asked is not None else None
        ranks = machine.question.asked.gpus_per_node if machine is not None else 1
        whole = machine is not None and machine.question.asked.zero_stage == 3
        return one * ranks if whole else one
    if re.search(r"(?<!off)load", name):
        return _largest(host, Phase.LOAD, lambda entry: Moment.LOAD in entry.moments)
    if "state" in name or "offload" in name:
        parts = [entry for entry in host.entries if re.search(r"offload|nvme-|paged", entry.name)]
        return max((sum(entry.bytes for entry in parts if moment in entry.moments) for moment in Moment), default=0)
    if "pinned" in name or "buffer" in name:
        found = entries_called(host, item)
        return None if found is None else sum(entry.bytes for entry in found)
    if re.search(r"peak|total|^host$|^ram$|cpu_ram|host_ram", name):
        return host.required_bytes
    found = entries_called(host, item)
    return None if found is None else sum(entry.bytes for entry in found)


def _largest(bill: ResourceLedger, phase: Phase, wanted: Callable[[Entry], bool]) -> int:
    moments = [moment for moment in Moment if moment.phase is phase]
    return max(
        sum(entry.bytes for entry in bill.entries if moment in entry.moments and wanted(entry)) for moment in moments
    )


def _account(account: Account) -> Callable[[Asked, Ledger], int]:
    def figure(_asked: Asked, ledger: Ledger) -> int:
        return max(ledger.gpu.by_account(moment)[account] for moment in Moment)

    return figure


def _model_states(_asked: Asked, ledger: Ledger) -> int:
    """Returns the largest sum over the phases of the step; buffers and activations left out."""

    def at(moment: Moment) -> int:
        return sum(
            entry.bytes
            for entry in ledger.gpu.entries
            if entry.account in _STATES and moment in entry.moments and not entry.name.startswith(("autocast", "tied"))
        )

    return max(at(moment) for moment in (Moment.STEP, Moment.BACKWARD_EMBEDDING))


def _one_logits_copy(asked: Asked, _ledger: Ledger) -> int:
    """Returns one fp32 copy of the logits of a micro-batch."""
    machine = asked.machine
    assert machine is not None
    return 4 * machine.question.asked.micro_batch_tokens * machine.question.model.vocab_size


def _logits(asked: Asked, ledger: Ledger) -> int:
    machine = asked.machine
    assert machine is not None
    names = ("logits",) if machine.question.asked.loss is LossHead.PLAIN else ("loss-tile", "loss-chunk")
    return sum(entry.bytes for entry in ledger.gpu.entries if entry.name in names)


def _whole_modules(asked: Asked, ledger: Ledger) -> int:
    """Returns what modules that train whole beside adapters add at the step: copies, gradients, optimizer states."""
    machine = asked.machine
    assert machine is not None
    config = machine.question.asked
    if config.lora is None or not config.lora.modules_to_save:
        return 0
    lora = replace(config.lora, modules_to_save=(), trains_embedding=False, trains_head=False)
    without = machine.estimator.ledger(replace(config, lora=lora)).gpu.by_account(Moment.STEP)
    with_them = ledger.gpu.by_account(Moment.STEP)
    return sum(with_them[account] - without[account] for account in _STATES)


def _load_peak(_asked: Asked, ledger: Ledger) -> int:
    return ledger.gpu.by_phase()[Phase.LOAD]


_FIGURES: tuple[tuple[tuple[str, ...], Callable[[Asked, Ledger], int]], ...] = (
    (("modules_to_save",), _whole_modules),
    (("logits", "copy"), _one_logits_copy),
    (("logits",), _logits),
    ((r"(?<!off)load",), _load_peak),
    (("eval",), lambda _, ledger: ledger.gpu.by_phase()[Phase.EVALUATE]),
    (("save",), lambda _, ledger: ledger.gpu.by_phase()[Phase.SAVE]),
    (("peak|total_gpu|required",), lambda _, ledger: ledger.gpu.required_bytes),
    (("optimizer_state|adam|moments",), _account(Account.OPTIMIZER_STATES)),
    (("master",), _account(Account.MASTER_WEIGHTS)),
    (("states",), _model_states),
    (("grad",), _account(Account.GRADIENTS)),
    (("weights|param|base_model",), _account(Account.PARAMETERS)),
    (("activation",), _account(Account.ACTIVATIONS)),
    (("workspace",), _account(Account.WORKSPACE)),
)
