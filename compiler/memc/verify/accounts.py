"""What a rank holds between steps, account by account, beside what the ledger books for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memc.ledger.entries import Moment
from memc.units import MIB
from memc.verify.lock import Promise, PromisedEntry
from memc.verify.probe import RankReport

STATES = ("parameters", "master_weights", "gradients", "optimizer_states")
AGREES_SHARE = 0.01
AGREES_BYTES = 4 * MIB
"""Differences up to the larger of the two are rounding: blocks, padding of shards, scalars of an optimizer."""


@dataclass(frozen=True, kw_only=True)
class AccountComparison:
    """One account at the end of the first step, gradients still there.

    Attributes:
        account: Its name.
        place: ``gpu`` or ``host``; ``cpu`` where a run without a GPU holds everything in one place.
        held_bytes: What the rank's tensors of it take.
        ledger_bytes: What the ledger books for one rank.
        entries: Names of the ledger's entries in it, largest first.
    """

    account: str
    place: str
    held_bytes: int
    ledger_bytes: int
    entries: tuple[str, ...]

    @property
    def difference_bytes(self) -> int:
        """Held minus booked."""
        return self.held_bytes - self.ledger_bytes

    @property
    def agrees(self) -> bool:
        """Whether the difference is rounding."""
        return abs(self.difference_bytes) <= max(AGREES_BYTES, AGREES_SHARE * self.ledger_bytes)


def compare_accounts(report: RankReport, promise: Promise) -> tuple[AccountComparison, ...]:
    """Returns what a rank held beside the ledger, of accounts whose tensors the script could see.

    Empty where a CPU stands in for a card that computes in fp16: the script takes other types there.

    Source: `held_bytes` of the emitted script counts storages; the ledger's entries at its moment ``step``.
    """
    if report.device == "cpu" and promise.settings.get("precision") == "fp16":
        return ()
    share = max(1, promise.gpus_per_node)
    gpu = [entry for entry in promise.entries if entry.in_allocator and Moment.STEP in entry.moments]
    host = [entry for entry in promise.host_entries if Moment.STEP in entry.moments]
    found = []
    for account in STATES:
        held = report.held_bytes.get(account)
        if held is None:
            continue
        on_gpu = _of(account, gpu, 1)
        on_host = _of(account, host, share)
        if report.device == "cpu":
            places = [("cpu", sum(held.values()), [*on_gpu, *on_host])]
        else:
            places = [("gpu", held.get("cuda", 0), on_gpu), ("host", held.get("cpu", 0), on_host)]
        found += [_compared(account, place, size, entries) for place, size, entries in places if size or entries]
    return tuple(found)


def _of(account: str, entries: Iterable[PromisedEntry], share: int) -> list[tuple[int, str]]:
    """Returns (bytes of one rank, name) of the entries in an account."""
    return [(entry.bytes // share, entry.name) for entry in entries if entry.account == account]


def _compared(account: str, place: str, held_bytes: int, entries: list[tuple[int, str]]) -> AccountComparison:
    return AccountComparison(
        account=account,
        place=place,
        held_bytes=held_bytes,
        ledger_bytes=sum(size for size, _ in entries),
        entries=tuple(name for _, name in sorted(entries, reverse=True) if name),
    )
