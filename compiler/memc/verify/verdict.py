"""What follows from the ranks' reports: does the measured peak fit, and how far is it from what the lock promised."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from memc.errors import Diagnostic, ExitCode
from memc.verify.accounts import AccountComparison, compare_accounts
from memc.verify.attribution import Attribution
from memc.verify.conditions import Conditions, notes
from memc.verify.lock import Promise
from memc.verify.probe import LEDGER_PHASES, RankReport

MEASURED = "measured"
OVER_MEMORY = ("out-of-memory", "measured-peak-over-budget")
VERIFICATION_SCHEMA = "memc/verification/1"
STEP_TIME_TOLERANCE = 0.15
"""Relative difference up to which a measured step counts as what the clock said (its own goal for the median)."""


@dataclass(frozen=True, kw_only=True)
class PhaseComparison:
    """One probed phase beside the ledger.

    Attributes:
        phase: Probed phase.
        allocated_bytes, reserved_bytes: Measured peaks of one rank.
        ledger_bytes: Largest allocated peak of the ledger's phases that happen in it; None when the ledger has none.
        difference_bytes: Measured allocated minus ledger; None with `ledger_bytes`.
    """

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    ledger_bytes: int | None
    difference_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RankVerdict:
    """One rank's peaks beside budget and ledger. Sizes are None when memory was not judged.

    Attributes:
        rank: Its number.
        device_name: As the driver names it.
        phases: In the order of the run.
        peak_allocated_bytes, peak_reserved_bytes: Largest over phases.
        outside_allocator_bytes: What the card held beyond reserved; the ledger's figure when it was not measured.
        required_bytes: Reserved and outside together.
        headroom_bytes: Budget minus required; negative when it does not fit.
        others_bytes: What others held on its card before the run; counted in what lies outside the allocator.
        host_rss_peak_bytes: Largest resident size of the process.
        host_pinned_peak_bytes: Most pinned host memory that torch's allocator held; None when unknown.
        accounts: What it held between steps beside the ledger.
        settled: Whether reserved memory stopped growing; None on a CPU.
        capacity_bytes: Memory that torch sees; None on a CPU.
        ran_out: Whether it stopped for want of memory.
        step_seconds: Median of one optimizer step after the first.
        tokens_per_second: Of this rank.
        first_loss, last_loss: Training loss; None when not a finite number.
    """

    rank: int
    device_name: str
    phases: tuple[PhaseComparison, ...]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    outside_allocator_bytes: int | None
    required_bytes: int | None
    headroom_bytes: int | None
    others_bytes: int
    host_rss_peak_bytes: int | None
    host_pinned_peak_bytes: int | None
    accounts: tuple[AccountComparison, ...]
    settled: bool | None
    capacity_bytes: int | None
    ran_out: bool
    step_seconds: float | None
    tokens_per_second: float | None
    first_loss: float | None
    last_loss: float | None

    @property
    def peak_phase(self) -> str:
        """Probed phase with the largest reserved peak; empty when none was measured."""
        return max(self.phases, key=lambda phase: phase.reserved_bytes).phase if self.phases else ""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The outcome of one verification.

    Attributes:
        device: ``cuda`` or ``cpu``.
        judged: Whether memory was measured on every rank; never on a CPU.
        fits: Whether every rank stayed within the budget; None when not judged.
        within_interval: Whether the measured need lies in the promised interval; None when not judged.
        budget_bytes: What one GPU may use.
        required_bytes: Largest need over ranks; None when not judged.
        headroom_bytes: Budget minus required; None when not judged.
        ledger_required_bytes: What the lock promised.
        uncertainty_bytes: Half the width of the promised interval.
        difference_bytes: Measured minus promised; None when not judged.
        step_seconds: Of the slowest rank; None without steps.
        clock_step_seconds: What the lock promised; None without a clock.
        step_time_matches: Whether the two differ by at most 15 %; None on a CPU or without either.
        steps: Optimizer steps asked for.
        world_size: Number of processes.
        random_weights: Whether the run built the model without its trained weights.
        driver: Version of the GPU driver; empty when unknown.
        versions: Library → version, of rank 0.
        ranks: By rank.
        seconds: Wall clock of the whole run.
        diagnostics: What is wrong; empty when the verification passed.
        log_tail: Last lines the launcher printed; empty when it passed.
        grade: ``measured`` on a card, ``rehearsed`` on one that does not exist.
        run_seconds: The whole run at the measured pace; None when it was not timed on a card, or its steps are unknown.
        budget_seconds: Longest allowed run; None without a limit.
        time_holds: Whether the run stays within it; None without either.
        host_resident_bytes: Peaks of all processes of this node, pages that they share counted in each; None when
            unknown.
        host_ledger_bytes: What the ledger books on the host of one node; None when it says nothing.
        conditions: What about the machine bears on the measurement, as the lock keeps it.
        files_digest: Of the files that ran.
        notes: What a reader must know of the machine, as sentences.
        attributions: Rank → what its memory was for; of ranks that left a snapshot.
        ranks_in_lock: Ranks that the lock's measurement holds by now, those of other nodes included; 0 when none was
            kept.
        total_steps: Optimizer steps of the whole run; None when the amount of data is unknown.
    """

    device: str
    judged: bool
    fits: bool | None
    within_interval: bool | None
    budget_bytes: int
    required_bytes: int | None
    headroom_bytes: int | None
    ledger_required_bytes: int
    uncertainty_bytes: int
    difference_bytes: int | None
    step_seconds: float | None
    clock_step_seconds: float | None
    step_time_matches: bool | None
    steps: int
    world_size: int
    random_weights: bool
    driver: str
    versions: dict[str, str]
    ranks: tuple[RankVerdict, ...]
    seconds: float
    diagnostics: tuple[Diagnostic, ...]
    log_tail: tuple[str, ...]
    grade: str = MEASURED
    run_seconds: float | None = None
    budget_seconds: float | None = None
    time_holds: bool | None = None
    host_resident_bytes: int | None = None
    host_ledger_bytes: int | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    files_digest: str = ""
    notes: tuple[str, ...] = ()
    attributions: dict[int, Attribution] = field(default_factory=dict)
    ranks_in_lock: int = 0
    total_steps: int | None = None

    @property
    def over_memory(self) -> bool:
        """Whether what is wrong is that the card has too little memory for the plan, and nothing else."""
        return bool(self.diagnostics) and all(finding.code in OVER_MEMORY for finding in self.diagnostics)

    @property
    def passed(self) -> bool:
        """Whether the run was sound and, where memory was judged, fits."""
        return not self.diagnostics

    @property
    def exit_code(self) -> ExitCode:
        """What `memc verify` exits with."""
        return ExitCode.OK if self.passed else ExitCode.VERIFICATION_FAILED

    def document(self) -> dict[str, Any]:
        """Returns the outcome for ``--json``: plain dicts, lists, numbers and text."""
        diagnostics = [
            {
                "code": finding.code,
                "message": finding.message,
                "where": str(finding.where or ""),
                "context": list(finding.context),
                "hint": finding.hint,
            }
            for finding in self.diagnostics
        ]
        own = asdict(self) | {"diagnostics": diagnostics, "exit_code": int(self.exit_code), "passed": self.passed}
        return {"schema": VERIFICATION_SCHEMA, **own}

    def measurement(self) -> dict[str, Any]:
        """Returns what the lock keeps: peaks and step time with their conditions; no date, host name or path."""
        ranks = [
            {
                "rank": rank.rank,
                "device_name": rank.device_name,
                "phases": {
                    phase.phase: {"allocated_bytes": phase.allocated_bytes, "reserved_bytes": phase.reserved_bytes}
                    for phase in rank.phases
                },
                "peak_allocated_bytes": rank.peak_allocated_bytes,
                "peak_reserved_bytes": rank.peak_reserved_bytes,
                "required_bytes": rank.required_bytes,
                "outside_allocator_bytes": rank.outside_allocator_bytes,
                "others_bytes": rank.others_bytes,
                "host_rss_peak_bytes": rank.host_rss_peak_bytes,
                "host_pinned_peak_bytes": rank.host_pinned_peak_bytes,
                "held_bytes": {f"{one.account} on {one.place}": one.held_bytes for one in rank.accounts},
                "settled": rank.settled,
                "tokens_per_second": None if rank.tokens_per_second is None else round(rank.tokens_per_second, 1),
            }
            for rank in self.ranks
        ]
        return {
            "grade": self.grade,
            "judged": self.judged,
            "fits": self.fits,
            "device": self.device,
            "driver": self.driver,
            "versions": dict(sorted(self.versions.items())),
            "steps": self.steps,
            "world_size": self.world_size,
            "random_weights": self.random_weights,
            "budget_bytes": self.budget_bytes,
            "required_bytes": self.required_bytes,
            "step_seconds": None if self.step_seconds is None else round(self.step_seconds, 4),
            "run_seconds": None if self.run_seconds is None else round(self.run_seconds, 1),
            "conditions": self.conditions,
            "files_digest": self.files_digest,
            "ranks": ranks,
        }


def judge_rank(report: RankReport, promise: Promise, conditions: Conditions | None = None) -> RankVerdict:
    """Returns one rank's peaks beside what `promise` says.

    Assumes: `device_used_bytes` was read while the allocator held its peak, as it does unless its cache is emptied.
        Other processes on the card count, since they take from the same memory.
    Source: torch.cuda.max_memory_reserved and cudaMemGetInfo, as the emitted script records them.
    """
    reserved: int | None = None
    outside: int | None = None
    if report.phases:
        reserved = report.peak_reserved_bytes
        outside = promise.outside_allocator_bytes
        if report.device_used_bytes is not None:
            outside = max(0, report.device_used_bytes - reserved)
    required = None if reserved is None or outside is None else reserved + outside
    return RankVerdict(
        rank=report.rank,
        device_name=report.device_name,
        phases=_compare_phases(report, promise),
        peak_allocated_bytes=report.peak_allocated_bytes if report.phases else None,
        peak_reserved_bytes=reserved,
        outside_allocator_bytes=outside,
        required_bytes=required,
        headroom_bytes=None if required is None else promise.budget_bytes - required,
        others_bytes=0 if conditions is None else conditions.others_bytes(report),
        host_rss_peak_bytes=report.host_rss_peak_bytes,
        host_pinned_peak_bytes=report.host_pinned_peak_bytes,
        accounts=compare_accounts(report, promise),
        settled=report.settled,
        capacity_bytes=report.capacity_bytes,
        ran_out=report.error is not None and report.error.kind == "out-of-memory",
        step_seconds=report.steady_step_seconds,
        tokens_per_second=report.tokens_per_second,
        first_loss=_finite(report.losses[0]) if report.losses else None,
        last_loss=_finite(report.losses[-1]) if report.losses else None,
    )


def judge(
    reports: tuple[RankReport, ...],
    promise: Promise,
    *,
    device: str,
    steps: int,
    random_weights: bool,
    seconds: float,
    diagnostics: tuple[Diagnostic, ...],
    log_tail: tuple[str, ...],
    grade: str = MEASURED,
    conditions: Conditions | None = None,
    attributions: dict[int, Attribution] | None = None,
) -> Verification:
    """Returns the verification that follows from what the ranks reported and what went wrong (`diagnostics`)."""
    ranks = tuple(judge_rank(report, promise, conditions) for report in reports)
    needs = [rank.required_bytes for rank in ranks if rank.required_bytes is not None]
    judged = device == "cuda" and bool(ranks) and len(needs) == len(ranks)
    required = max(needs) if judged else None
    times = [rank.step_seconds for rank in ranks if rank.step_seconds is not None]
    step_seconds = max(times, default=None)
    difference = None if required is None else required - promise.required_bytes
    run_seconds = whole_run_seconds(step_seconds, promise) if device == "cuda" and grade == MEASURED else None
    resident = [rank.host_rss_peak_bytes for rank in ranks if rank.host_rss_peak_bytes is not None]
    return Verification(
        device=device,
        judged=judged,
        fits=None if required is None else required <= promise.budget_bytes,
        within_interval=None if difference is None else abs(difference) <= promise.uncertainty_bytes,
        budget_bytes=promise.budget_bytes,
        required_bytes=required,
        headroom_bytes=None if required is None else promise.budget_bytes - required,
        ledger_required_bytes=promise.required_bytes,
        uncertainty_bytes=promise.uncertainty_bytes,
        difference_bytes=difference,
        step_seconds=step_seconds,
        clock_step_seconds=promise.step_seconds,
        step_time_matches=_step_time_matches(step_seconds, promise.step_seconds) if device == "cuda" else None,
        steps=steps,
        world_size=reports[0].world_size if reports else promise.world_size or 0,
        random_weights=random_weights,
        driver=reports[0].driver if reports else "",
        versions=dict(reports[0].versions) if reports else {},
        ranks=ranks,
        seconds=seconds,
        diagnostics=diagnostics,
        log_tail=log_tail if diagnostics else (),
        grade=grade,
        run_seconds=run_seconds,
        budget_seconds=promise.budget_seconds,
        time_holds=_time_holds(run_seconds, promise),
        host_resident_bytes=sum(resident) if len(resident) == promise.gpus_per_node else None,
        host_ledger_bytes=promise.host_required_bytes,
        conditions={} if conditions is None else conditions.document(),
        files_digest=promise.files_digest,
        notes=() if conditions is None else notes(promise, conditions, reports),
        attributions=attributions or {},
        total_steps=promise.total_steps,
    )


def whole_run_seconds(step_seconds: float | None, promise: Promise) -> float | None:
    """Returns how long the whole run takes at the measured pace; None when its steps are unknown.

    The clock's run, which knows how long samples are, is longer or shorter by as much as its longest step is.
    """
    if step_seconds is None or promise.total_steps is None:
        return None
    if promise.total_seconds is None or not promise.step_seconds:
        return step_seconds * promise.total_steps
    return promise.total_seconds * step_seconds / promise.step_seconds


def _time_holds(run_seconds: float | None, promise: Promise) -> bool | None:
    if run_seconds is None or promise.budget_seconds is None:
        return None
    return run_seconds <= promise.budget_seconds


def _compare_phases(report: RankReport, promise: Promise) -> tuple[PhaseComparison, ...]:
    comparisons = []
    for phase, ledger_phases in LEDGER_PHASES.items():
        if (peak := report.phases.get(phase)) is None:
            continue
        booked = max((promise.by_phase.get(name, 0) for name in ledger_phases), default=0) or None
        comparisons.append(
            PhaseComparison(
                phase=phase,
                allocated_bytes=peak.allocated_bytes,
                reserved_bytes=peak.reserved_bytes,
                ledger_bytes=booked,
                difference_bytes=None if booked is None else peak.allocated_bytes - booked,
            )
        )
    return tuple(comparisons)


def _step_time_matches(measured: float | None, promised: float | None) -> bool | None:
    if measured is None or not promised:
        return None
    return abs(measured - promised) <= STEP_TIME_TOLERANCE * promised


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
