"""Where a rehearsed run ran out of memory, beside where the ledger says that it must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from memc.errors import Diagnostic
from memc.ledger.entries import ALLOCATOR, Account, Moment
from memc.units import format_gib
from memc.verify.lock import Promise, PromisedEntry

OUT_OF_MEMORY = "out-of-memory"
_PASS = (
    Moment.FORWARD,
    Moment.LOSS,
    Moment.BACKWARD_FIRST_LAYER,
    Moment.BACKWARD_LAST_LAYER,
    Moment.BACKWARD_EMBEDDING,
)


def named(finding: Diagnostic, report: Path, promise: Promise, capacity_bytes: int) -> Diagnostic:
    """Returns a finding of memory that ran out with the phase it was in and the phase that the ledger names.

    Any other finding is returned as it is.

    Args:
        finding: What is wrong.
        report: What the stage wrote when the allocation failed.
        promise: The lock.
        capacity_bytes: What torch sees of the card that was played.
    """
    try:
        told = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return finding
    if finding.code != OUT_OF_MEMORY:
        return finding
    doing = told["doing"] or "loading or saving"
    text = f"It asked for {format_gib(told['asked_bytes'])} in {doing}. {_ledger_says(promise, capacity_bytes)}"
    hint = finding.hint
    if capacity_bytes < promise.required_bytes:
        need, has = format_gib(promise.required_bytes), format_gib(capacity_bytes)
        hint = f"the plan needs {need}, this card has {has}: compile for it (hardware.gpu or memory.target in the spec)"
    return replace(finding, message=f"{finding.message} {text}", hint=hint)


def _ledger_says(promise: Promise, capacity_bytes: int) -> str:
    first = first_shortfall(promise, capacity_bytes)
    if first is None:
        return f"The ledger books no moment above the {format_gib(capacity_bytes)} of this card."
    moment, need, largest = first
    return (
        f"The ledger says {moment.phase.value}: {format_gib(need)} there, of {format_gib(capacity_bytes)}; "
        f"first of all {largest.name or largest.account} with {format_gib(largest.bytes)}."
    )


def first_shortfall(promise: Promise, capacity_bytes: int) -> tuple[Moment, int, PromisedEntry] | None:
    """Returns the first moment of a run that the ledger books above a card's size, its bytes and its largest entry.

    None where all of it fits.

    The first pass has no gradients yet, and where the optimizer makes its states with the first step, the passes of
    that step run without them. DeepSpeed makes them before.

    Source: torch/optim (lazy states), deepspeed stage_1_and_2.py and stage3.py initialize_optimizer_states.
    """
    for moment, without in _course(promise):
        alive = [entry for entry in _alive(promise, moment) if entry.account not in without]
        need = sum(entry.bytes for entry in alive)
        if need > capacity_bytes:
            return moment, need, max(alive, key=lambda entry: entry.bytes)
    return None


def _course(promise: Promise) -> Iterator[tuple[Moment, frozenset[str]]]:
    """Yields the moments of a run in their order, each with the accounts that are not there yet."""
    late = frozenset[str]() if promise.settings.get("engine") == "deepspeed" else frozenset({Account.OPTIMIZER_STATES})
    yield Moment.LOAD, frozenset()
    for moment in _PASS:
        early = moment in (Moment.FORWARD, Moment.LOSS)
        yield moment, late | {Account.GRADIENTS} if early else late
    if int(promise.settings.get("gradient_accumulation_steps", 1)) > 1:
        yield from ((moment, late) for moment in _PASS)
    yield Moment.STEP, frozenset()
    yield from ((moment, frozenset()) for moment in (*_PASS, Moment.STEP, Moment.EVALUATE, Moment.SAVE))


def _alive(promise: Promise, moment: Moment) -> Iterator[PromisedEntry]:
    """Yields what is alive at a moment, without what the allocator keeps: it gives that back before it fails."""
    return (one for one in promise.entries if moment in one.moments and not one.name.startswith(ALLOCATOR))
