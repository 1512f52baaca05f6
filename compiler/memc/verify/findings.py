"""What can be wrong with a probe run, each as one diagnostic: the run itself first, then its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from memc.errors import Diagnostic, Location
from memc.units import GIB, format_gib, format_seconds
from memc.verify.attribution import Attribution, booked_accounts, sentence
from memc.verify.conditions import Conditions, process_lines
from memc.verify.lock import Promise
from memc.verify.operators import abandoned_locks, removing
from memc.verify.probe import RankReport
from memc.verify.processes import Finished
from memc.verify.verdict import RankVerdict, judge_rank, whole_run_seconds

OUT_OF_MEMORY = "out-of-memory"
CONTEXT_LINES = 6
LOWEST_TARGET_BYTES = GIB


def run_findings(
    finished: Finished,
    reports: tuple[RankReport, ...],
    broken: tuple[str, ...],
    promise: Promise,
    *,
    device: str,
    timeout_seconds: float,
    ranks: range | None = None,
    attributions: Mapping[int, Attribution] | None = None,
) -> tuple[Diagnostic, ...]:
    """Returns why the run is not sound: a rank that failed, the time limit, the launcher, a report, a loss.

    Only the nearest cause is given: a rank's own error explains why the launcher failed and others are missing. Of
    ranks that stopped, those that ran out of memory are given alone: the others lost them.

    Args:
        finished: How the launcher ended.
        reports: What the ranks wrote.
        broken: A sentence on each report that cannot be used.
        promise: The lock.
        device: ``cuda`` or ``cpu``.
        timeout_seconds: The time limit.
        ranks: Ranks that run on this machine; None: all.
        attributions: Rank → what its memory was for when it ran out.
    """
    launcher = promise.path.parent / "launch.sh"
    failed = [report for report in reports if report.error is not None]
    short = [report for report in failed if report.error is not None and report.error.kind == OUT_OF_MEMORY]
    if failed:
        return tuple(_rank_error(report, promise, (attributions or {}).get(report.rank)) for report in short or failed)
    missing = _missing_ranks(reports, promise, ranks)
    if finished.timed_out:
        return (_timed_out(finished, missing, launcher, timeout_seconds),)
    if finished.exit_code != 0:
        return (_launcher_failed(finished, launcher),)
    if broken or missing:
        return (_reports_missing(missing, broken, finished, launcher),)
    return tuple(_unsound(reports, promise, device))


def rank_findings(
    finished: Finished,
    reports: tuple[RankReport, ...],
    broken: tuple[str, ...],
    promise: Promise,
    *,
    rank: int,
    timeout_seconds: float,
    attributions: Mapping[int, Attribution] | None = None,
) -> tuple[Diagnostic, ...]:
    """Returns why a run that plays one rank alone is not sound; its losses are nobody's, and not looked at."""
    launcher = promise.path.parent / "launch.sh"
    failed = [report for report in reports if report.error is not None]
    if failed:
        return tuple(_rank_error(report, promise, (attributions or {}).get(report.rank)) for report in failed)
    missing = () if any(report.rank == rank for report in reports) else (rank,)
    if finished.timed_out:
        return (_timed_out(finished, missing, launcher, timeout_seconds),)
    if finished.exit_code != 0:
        return (_launcher_failed(finished, launcher),)
    if broken or missing:
        return (_reports_missing(missing, broken, finished, launcher),)
    return ()


def memory_findings(
    reports: tuple[RankReport, ...], promise: Promise, conditions: Conditions | None = None
) -> tuple[Diagnostic, ...]:
    """Returns one diagnostic when the measured need of any rank is above the budget, for the worst of them.

    Where it would not be without what others held on the card before the run, they are named instead.
    """
    verdicts = [judge_rank(report, promise, conditions) for report in reports]
    over = [verdict for verdict in verdicts if verdict.headroom_bytes is not None and verdict.headroom_bytes < 0]
    if not over:
        return ()
    worst = max(over, key=lambda verdict: (verdict.required_bytes or 0) - verdict.others_bytes)
    required = worst.required_bytes or 0
    if conditions is not None and required - worst.others_bytes <= promise.budget_bytes:
        card = conditions.card_of(next(report for report in reports if report.rank == worst.rank))
        return (_shared_card(worst, promise, () if card is None else process_lines(card)),)
    message = (
        f"rank {worst.rank} needs {format_gib(required)} ({format_gib(worst.peak_reserved_bytes or 0)} reserved, "
        f"{format_gib(worst.outside_allocator_bytes or 0)} outside the allocator), "
        f"{format_gib(required - promise.budget_bytes)} above the budget of {format_gib(promise.budget_bytes)}; "
        f"it peaks in {worst.peak_phase}. {_largest_account(worst.peak_phase, promise)}"
    )
    return (
        Diagnostic(
            code="measured-peak-over-budget",
            message=message,
            where=Location(file=str(promise.path), field="budget.gpu_bytes"),
            context=tuple(
                f"{phase.phase:<10} {format_gib(phase.allocated_bytes):>10} allocated, "
                f"ledger {format_gib(phase.ledger_bytes) if phase.ledger_bytes is not None else 'has no such phase'}"
                for phase in worst.phases
            ),
            hint=_lower_target(required, promise),
        ),
    )


def _shared_card(worst: RankVerdict, promise: Promise, processes: tuple[str, ...]) -> Diagnostic:
    required = worst.required_bytes or 0
    return Diagnostic(
        code="card-shared",
        message=f"rank {worst.rank} needs {format_gib(required - worst.others_bytes)} itself, within the budget of "
        f"{format_gib(promise.budget_bytes)}; with the {format_gib(worst.others_bytes)} that others held on the card "
        f"before the run it is {format_gib(required)}",
        where=Location(file=str(promise.path), field="budget.gpu_bytes"),
        context=processes,
        hint="end what else uses the card and verify again; where it stays, set memory.target to what it leaves",
    )


def time_findings(step_seconds: float | None, promise: Promise) -> tuple[Diagnostic, ...]:
    """Returns one diagnostic when the whole run, at the measured pace, takes longer than the spec allows."""
    total = whole_run_seconds(step_seconds, promise)
    if total is None or step_seconds is None or promise.budget_seconds is None or total <= promise.budget_seconds:
        return ()
    clock = f", the clock said {format_seconds(promise.step_seconds)}" if promise.step_seconds else ""
    return (
        Diagnostic(
            code="measured-time-over-budget",
            message=f"a step takes {format_seconds(step_seconds)}{clock}: {promise.total_steps} of them make the run "
            f"{format_seconds(total)}, {format_seconds(total - promise.budget_seconds)} above the budget of "
            f"{format_seconds(promise.budget_seconds)}",
            where=Location(file=str(promise.path), field="budget.seconds"),
            hint="raise time.budget, train on less data or for fewer epochs, or take a faster card: "
            "memc hardware lists them",
        ),
    )


def no_gpu(reason: str, folder: Path) -> Diagnostic:
    """Returns the diagnostic for a machine without a GPU."""
    return Diagnostic(
        code="no-gpu",
        message=f"this machine offers no GPU to measure on: {reason}",
        hint=f"run `memc verify {folder} --device cpu`: it trains for real, but memory is not judged",
    )


def too_few_gpus(count: int, needed: int, folder: Path) -> Diagnostic:
    """Returns the diagnostic for a machine with fewer GPUs than the plan's node has."""
    return Diagnostic(
        code="too-few-gpus",
        message=f"the plan runs on {needed} GPUs of one node; this machine offers {count}",
        where=Location(file=str(folder)),
        hint=f"run it on a machine with {needed} GPUs, or set hardware.count to {count} in the spec and compile again",
    )


def _rank_error(report: RankReport, promise: Promise, found: Attribution | None) -> Diagnostic:
    error = report.error
    assert error is not None
    phase = error.phase or "an unknown phase"
    context = tuple(line for line in error.message.splitlines() if line.strip())[:CONTEXT_LINES]
    if error.kind != OUT_OF_MEMORY:
        return Diagnostic(
            code="rank-failed",
            message=f"rank {report.rank} of {report.world_size} stopped in {phase} with an exception",
            context=context,
            hint="mend what the lines above name, then verify again",
        )
    seen = max(report.peak_reserved_bytes, report.device_used_bytes or 0)
    capacity = f" of {format_gib(report.capacity_bytes)}" if report.capacity_bytes else ""
    if found is not None:
        context = (*context[:1], *found.frames)[:CONTEXT_LINES]
    return Diagnostic(
        code="out-of-memory",
        message=f"rank {report.rank} of {report.world_size} ran out of memory in {phase}, with {format_gib(seen)}"
        f"{capacity} in use; the plan promised {format_gib(promise.required_bytes)}. "
        + (_largest_account(error.phase, promise) if found is None else sentence(found, promise, error.phase)),
        context=context,
        hint=_lower_target(max(seen, report.capacity_bytes or 0), promise),
    )


def _timed_out(finished: Finished, missing: tuple[int, ...], launcher: Path, timeout_seconds: float) -> Diagnostic:
    locks = abandoned_locks(os.environ)
    again = f"when it was still making progress, allow more with --timeout {int(timeout_seconds * 2)}"
    waiting = f"no report from {_ranks(missing)}" if missing else "all ranks had reported, but the launcher went on"
    return Diagnostic(
        code="verification-timed-out",
        message=f"not finished after {format_seconds(timeout_seconds)}, so all its processes were ended; {waiting}",
        where=Location(file=str(launcher)),
        context=_last_lines(finished),
        hint=f"{removing(locks)}; {again}" if locks else again,
    )


def _launcher_failed(finished: Finished, launcher: Path) -> Diagnostic:
    code = finished.exit_code or 0
    ended = f"was ended by signal {-code}" if code < 0 else f"exited {code}"
    return Diagnostic(
        code="launcher-failed",
        message=f"{launcher.name} {ended} after {format_seconds(finished.seconds)} and no rank said why",
        where=Location(file=str(launcher)),
        context=_last_lines(finished),
        hint="mend what the lines above name, then verify again; requirements.txt lists what the script needs",
    )


def _reports_missing(
    missing: tuple[int, ...], broken: tuple[str, ...], finished: Finished, launcher: Path
) -> Diagnostic:
    found = [f"{_ranks(missing)} wrote no report"] if missing else []
    return Diagnostic(
        code="rank-report-missing",
        message=f"{launcher.name} exited 0, but " + "; ".join([*found, *broken]),
        where=Location(file=str(launcher)),
        context=_last_lines(finished),
        hint="check that all processes start, and run the same train.py, on this machine; then verify again",
    )


def _unsound(reports: tuple[RankReport, ...], promise: Promise, device: str) -> Iterator[Diagnostic]:
    sizes = sorted({report.world_size for report in reports})
    expected = promise.world_size or sizes[0]
    if sizes != [expected]:
        yield Diagnostic(
            code="wrong-world-size",
            message=f"the plan runs {expected} processes; the ranks report a world of {', '.join(map(str, sizes))}",
            hint="unset WORLD_SIZE, RANK and other launcher variables in this shell, then verify again",
        )
    for report in reports:
        if device == "cuda" and report.device != "cuda":
            yield Diagnostic(
                code="ran-without-gpu",
                message=f"rank {report.rank} trained on the CPU although a GPU was asked for",
                hint="install a build of torch that supports this GPU, then verify again",
            )
        elif device == "cuda" and not report.phases:
            yield Diagnostic(
                code="peaks-not-reported",
                message=f"rank {report.rank} reported no memory peak of any phase",
                hint="compile the spec again with this version of memc, then verify",
            )
        if not report.trained:
            yield Diagnostic(
                code="loss-not-finite",
                message=f"rank {report.rank} trained with losses {_shown(report.losses)}; each must be a finite number",
                hint="check the training data, lower training.learning_rate, or use bf16 in place of fp16",
            )


def _shown(losses: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{loss:.4g}" for loss in losses) + "]"


def _missing_ranks(reports: tuple[RankReport, ...], promise: Promise, ranks: range | None) -> tuple[int, ...]:
    world = max([promise.world_size or 1, *(report.world_size for report in reports)])
    return tuple(sorted(set(range(world) if ranks is None else ranks) - {report.rank for report in reports}))


def _ranks(numbers: tuple[int, ...]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _last_lines(finished: Finished) -> tuple[str, ...]:
    return tuple(line for line in finished.tail if line.strip())[-CONTEXT_LINES:]


def _largest_account(probed_phase: str, promise: Promise) -> str:
    """Returns a sentence that names the account which the ledger books largest where the run peaked.

    A probed phase spans several moments of the ledger; the fullest of them is meant. Without a phase, of all.
    """
    bill = booked_accounts(promise, probed_phase)
    if not bill:
        return "The ledger books nothing there."
    account = max(bill, key=lambda name: bill[name])
    return f"The largest account there is {account}: the ledger books {format_gib(bill[account])} for it."


def _lower_target(measured_bytes: int, promise: Promise) -> str:
    """Returns the edit of the spec that makes a plan leave room for what the ledger missed."""
    missed = max(measured_bytes - promise.required_bytes, measured_bytes - promise.budget_bytes)
    target = promise.budget_bytes - missed
    if target < LOWEST_TARGET_BYTES:
        return "close other programs that use this GPU (nvidia-smi lists them), then verify again"
    shown = int(target / GIB * 10) / 10
    return (
        f"close other programs on this GPU (nvidia-smi lists them) and verify again, or set memory.target to "
        f"{shown}GiB in the spec and compile again: that leaves room for the {format_gib(missed)} the ledger missed"
    )
