"""What follows from the ranks' reports: does the measured peak fit, and how far is it from what the lock promised."""

from __future__ import annotations

import math

from memc.errors import Diagnostic
from memc.verify.accounts import compare_accounts
from memc.verify.attribution import Attribution
from memc.verify.conditions import Conditions, notes
from memc.verify.lock import Promise
from memc.verify.probe import LEDGER_PHASES, RankReport
from memc.verify.verification import MEASURED, PhaseComparison, RankVerdict, Verification

STEP_TIME_TOLERANCE = 0.15
"""Relative difference up to which a measured step counts as what the clock said (its own goal for the median)."""


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
