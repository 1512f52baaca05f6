"""How far the ledger is from what was rehearsed, phase by phase."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from differences import Summary, summary_of
from memc.errors import MemcError
from memc.ledger.entries import Phase
from memc.verify.probe import LEDGER_PHASES

from rehearsed.cases import Case
from rehearsed.runs import Rehearsed, plan_of, spec_digest


@dataclass(frozen=True)
class Comparison:
    """One case in which both sides have figures.

    Attributes:
        case: Which.
        run: What was rehearsed.
        ledger: Allocated peaks of the ledger by probed phase.
        ledger_reserved_bytes: Reserved peak of the ledger.
    """

    case: Case
    run: Rehearsed
    ledger: dict[str, int]
    ledger_reserved_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """Reserved peak of the rehearsal, over all phases."""
        return max(self.run.reserved.values())

    @property
    def difference(self) -> float:
        """Reserved peak: ledger over rehearsal, less one."""
        return self.ledger_reserved_bytes / self.reserved_bytes - 1

    def allocated_difference(self, phase: str) -> float | None:
        """Allocated peak of a probed phase: ledger over rehearsal, less one; None when it was not seen."""
        seen = self.run.allocated.get(phase)
        return self.ledger[phase] / seen - 1 if seen else None


@dataclass(frozen=True)
class Skipped:
    """One case without a comparison, and why."""

    case: Case
    reason: str


def compare(wanted: Iterable[Case], runs: Mapping[str, Rehearsed]) -> tuple[list[Comparison], list[Skipped]]:
    """Returns comparisons and what could not be compared; the ledger is computed anew."""
    found, skipped = [], []
    with tempfile.TemporaryDirectory(prefix="memc-rehearsed-") as scratch:
        for case in wanted:
            reason = _why_not(case, runs.get(case.name))
            if not reason:
                try:
                    found.append(_compared(case, runs[case.name], Path(scratch)))
                except MemcError as error:
                    reason = "; ".join(one.message for one in error.diagnostics)
            if reason:
                skipped.append(Skipped(case, reason))
    return found, skipped


def _why_not(case: Case, run: Rehearsed | None) -> str:
    if not case.card:
        return "no card of the list has room"
    if run is None:
        return "not rehearsed yet"
    return run.error or ("" if run.spec == spec_digest(case) else "rehearsed with another spec")


def _compared(case: Case, run: Rehearsed, scratch: Path) -> Comparison:
    gpu = plan_of(case, scratch).ledger.gpu
    by_phase = gpu.by_phase()
    ledger = {probed: max(by_phase[Phase(name)] for name in phases) for probed, phases in LEDGER_PHASES.items()}
    return Comparison(case, run, ledger, gpu.peak_reserved_bytes)


def summaries(comparisons: Iterable[Comparison], kind: Callable[[Comparison], str]) -> dict[str, Summary]:
    """Returns the statistics of the reserved peak of each kind of comparison, in order of appearance."""
    groups: dict[str, list[float]] = {}
    for item in comparisons:
        groups.setdefault(kind(item), []).append(item.difference)
    return {name: row for name, found in groups.items() if (row := summary_of(found)) is not None}
