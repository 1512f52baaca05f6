"""What can be wrong with a probe run, each as one diagnostic."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from memc.errors import Diagnostic, Location, MemcError, usage_error
from memc.units import GIB, format_gib, format_seconds
from memc.verify.attribution import Attribution, sentence
from memc.verify.lock import Promise
from memc.verify.operators import abandoned_locks, removing
from memc.verify.probe import RankReport
from memc.verify.processes import Finished
from memc.verify.shortages import largest_account, lower_target

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


def unwritable(folder: Path, error: OSError) -> MemcError:
    """Returns the refusal of a run for which nothing can be written below `folder`, exit 2."""
    return usage_error(
        "verify-folder",
        f"nothing can be written below {folder}: {error.strerror or error}",
        where=Location(file=str(folder)),
        hint="reports and a checkpoint lie there for a while, and the measurement stays in the lock: make room or "
        "allow writing, or copy the folder with its spec to another place",
    )


def not_kept(promise: Promise, error: OSError) -> Diagnostic:
    """Returns the diagnostic for a measurement that could not be written into the lock."""
    return Diagnostic(
        code="measurement-not-kept",
        message=f"the run went to its end, but {promise.path.name} could not be written: {error.strerror or error}",
        where=Location(file=str(promise.path)),
        hint="make room or allow writing, and verify again; the lock is as it was",
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
        + (largest_account(error.phase, promise) if found is None else sentence(found, promise, error.phase)),
        context=context,
        hint=lower_target(max(seen, report.capacity_bytes or 0), promise),
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
