"""`verify`: check the folder, run it, judge what the ranks measured, keep the measurement in the lock."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from memc.config import Engine
from memc.errors import ExitCode, MemcError, usage_error
from memc.verify.conditions import Conditions, busy_card, conditions_here
from memc.verify.devices import visible_gpus
from memc.verify.findings import no_gpu, too_few_gpus, unwritable
from memc.verify.lock import Promise, read_lock, require_unedited
from memc.verify.measurements import keep
from memc.verify.nodes import ranks_here
from memc.verify.operators import abandoned_locks, removing
from memc.verify.shortages import memory_findings, time_findings
from memc.verify.starts import Settings, Starts
from memc.verify.synthetic import model_folder
from memc.verify.verdict import judge
from memc.verify.verification import Verification

SCRATCH = ".memc-verify-"
DEVICES = ("auto", "cuda", "cpu")
"""`auto` needs a GPU and looks for one first; `cuda` does not look; `cpu` trains for real without judging memory."""


def verify(
    folder: Path,
    *,
    settings: Settings | None = None,
    on_line: Callable[[str], None],
) -> Verification:
    """Runs the launcher in `folder` for a few steps and returns what was measured beside what was promised.

    The launcher is started from the current folder, as for training, so that data paths mean the same. A completed
    run is added to the lock's measurements, whether it fits or not; any other leaves the lock as it was. Nothing that
    was started or written for the probe is left, however this ends, but for the snapshots that were asked for.

    Of a plan for several nodes, each node makes the same call and judges its own ranks.

    Args:
        folder: What `memc compile` wrote.
        settings: How to run it.
        on_line: Called with each line that the launcher prints, on a thread of its own.

    Raises:
        MemcError: Exit 2 for a bad argument or lock, 4 for edited files, 5 when this machine has too few GPUs or others
            use them. What goes wrong after the launcher is started stands in the result.
    """
    settings = settings or Settings()
    _require_arguments(settings)
    promise = read_lock(folder)
    require_unedited(folder, promise)
    ranks = ranks_here(promise)
    conditions = Conditions() if settings.device == "cpu" else conditions_here(len(ranks))
    if settings.device == "auto":
        _require_gpus(promise, folder, conditions)
        settings = replace(settings, device="cuda")
    if promise.engine == Engine.DEEPSPEED and (locks := abandoned_locks(os.environ)):
        on_line(f"memc: where the run needs it, it would wait for ever; {removing(locks)}")
    with _scratch(folder, promise, settings) as scratch:
        ran = Starts(folder, promise, settings, ranks, scratch, on_line).run()
    findings = ran.findings
    sound = not findings
    if sound and settings.device == "cuda":
        times = [report.steady_step_seconds for report in ran.reports]
        slowest = max((seconds for seconds in times if seconds is not None), default=None)
        findings = (*memory_findings(ran.reports, promise, conditions), *time_findings(slowest, promise))
    verification = judge(
        ran.reports,
        promise,
        device=settings.device,
        steps=max((len(report.step_seconds) for report in ran.reports), default=settings.least_steps),
        random_weights=settings.random_weights,
        seconds=ran.finished.seconds,
        diagnostics=findings,
        log_tail=ran.finished.tail,
        conditions=conditions,
        attributions=ran.attributions,
    )
    return keep(promise, verification) if sound else verification


@contextlib.contextmanager
def _scratch(folder: Path, promise: Promise, settings: Settings) -> Iterator[Path]:
    """Yields a folder for what the ranks write, in which there is room for a lock, and for the model where it is made.

    Raises:
        MemcError: Exit 2 when nothing can be written there, or to where snapshots are to go.
    """
    with contextlib.ExitStack() as stack:
        place = folder
        try:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder.resolve(), prefix=SCRATCH)))
            (scratch / "room").write_bytes(promise.path.read_bytes())
            (scratch / "room").unlink()
            if settings.random_weights:
                model_folder(promise, scratch)
            if settings.snapshots is not None:
                place = settings.snapshots
                place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(place, error) from error
        yield scratch


def _require_arguments(settings: Settings) -> None:
    if settings.device not in DEVICES:
        hint = f"use one of {', '.join(DEVICES)}"
        raise usage_error("verify-device", f"device {settings.device!r} is unknown", hint=hint)
    if settings.least_steps < 1:
        raise usage_error("verify-steps", f"{settings.least_steps} steps measure nothing", hint="use --steps 2 or more")
    if settings.timeout_seconds <= 0:
        message = f"a time limit of {settings.timeout_seconds} s leaves no time"
        raise usage_error("verify-timeout", message, hint="use seconds")


def _require_gpus(promise: Promise, folder: Path, conditions: Conditions) -> None:
    gpus, needed = visible_gpus(), promise.gpus_per_node
    if gpus.count == 0:
        raise MemcError((no_gpu(gpus.reason, folder),), ExitCode.VERIFICATION_FAILED)
    if gpus.count < needed:
        raise MemcError((too_few_gpus(gpus.count, needed, folder),), ExitCode.VERIFICATION_FAILED)
    if (busy := busy_card(promise, conditions)) is not None:
        raise MemcError((busy,), ExitCode.VERIFICATION_FAILED)
