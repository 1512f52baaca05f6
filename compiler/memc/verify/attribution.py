"""What the blocks of a card were allocated for, as a memory snapshot says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from memc.units import format_gib
from memc.verify.lock import Promise
from memc.verify.probe import LEDGER_PHASES


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """One rank's memory by account, at its peak, when an allocation failed, or at its end.

    Attributes:
        moment: ``peak``, ``failure``, or ``end`` of a run of which no history was kept.
        accounts: Account → bytes in use; ``unattributed`` for blocks whose frames tell nothing.
        allocated_bytes: All of them.
        failed_bytes: What the allocation that failed asked for; 0 when none did.
        frames: The places in code that hold most, with their sizes.
    """

    moment: str
    accounts: dict[str, int]
    allocated_bytes: int
    failed_bytes: int
    frames: tuple[str, ...]


ReadSnapshot = Callable[[bytes], Attribution]
"""Reads what torch.cuda.memory._dump_snapshot wrote."""


def sentence(found: Attribution, promise: Promise, probed_phase: str) -> str:
    """Returns what was in use by account, with what the ledger books where they differ most."""
    parts = ", ".join(f"{name} {format_gib(size)}" for name, size in _largest_first(found.accounts))
    text = f"In use then: {parts}."
    account = overshooting(found, promise, probed_phase)
    if account is not None:
        booked = booked_accounts(promise, probed_phase).get(account, 0)
        text += f" Above the ledger is {account}: it books {format_gib(booked)}."
    return text


def overshooting(found: Attribution, promise: Promise, probed_phase: str) -> str | None:
    """Returns the account that is furthest above what the ledger books in a phase; None when none is."""
    booked = booked_accounts(promise, probed_phase)
    over = {name: size - booked.get(name, 0) for name, size in found.accounts.items() if name != "unattributed"}
    name = max(over, key=lambda account: over[account], default=None)
    return name if name is not None and over[name] > 0 else None


def booked_accounts(promise: Promise, probed_phase: str) -> dict[str, int]:
    """Returns the ledger's bytes by account at the fullest moment of a probed phase; of all when it is none."""
    phases = LEDGER_PHASES.get(probed_phase, tuple(promise.by_phase))
    best: Counter[str] = Counter()
    for moment in {moment for entry in promise.entries for moment in entry.moments if moment.phase in phases}:
        bill: Counter[str] = Counter()
        for entry in promise.entries:
            if moment in entry.moments and entry.in_allocator:
                bill[entry.account] += entry.bytes
        best = max(best, bill, key=lambda one: one.total())
    return dict(best)


def _largest_first(accounts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, size) for name, size in accounts.items() if size), key=lambda item: -item[1])
