"""`verify`: check the folder, run it, judge what the ranks measured, keep the measurement in the lock."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from memc.errors import ExitCode, MemcError, usage_error
from memc.verify.devices import visible_gpus
from memc.verify.findings import memory_findings, no_gpu, run_findings, too_few_gpus
from memc.verify.lock import Promise, append_measurement, read_lock, require_unedited
from memc.verify.probe import read_reports
from memc.verify.processes import run_launcher
from memc.verify.verdict import Verification, judge

LAUNCHER = "launch.sh"
DEVICES = ("auto", "cuda", "cpu")
"""`auto` needs a GPU and looks for one first; `cuda` does not look; `cpu` trains for real without judging memory."""


def verify(
    folder: Path,
    *,
    device: str = "auto",
    steps: int = 4,
    timeout_seconds: float = 900.0,
    random_weights: bool = False,
    on_line: Callable[[str], None],
) -> Verification:
    """Runs the launcher in `folder` for a few steps and returns what was measured beside what was promised.

    The launcher is started from the current folder, as for training, so that data paths mean the same. A completed
    run is added to the lock's measurements, whether it fits or not; any other leaves the lock as it was. Nothing that
    was started or written for the probe is left, however this ends.

    Args:
        folder: What `memc compile` wrote.
        device: One of `DEVICES`.
        steps: Optimizer steps.
        timeout_seconds: Wall clock after which everything is ended.
        random_weights: Whether to build the model without its trained weights (memory and time are the same).
        on_line: Called with each line that the launcher prints, on a thread of its own.

    Raises:
        MemcError: Exit 2 for a bad argument or lock, 4 for edited files, 5 when this machine has too few GPUs. What
            goes wrong after the launcher is started stands in the result.
    """
    _require_arguments(device, steps, timeout_seconds)
    promise = read_lock(folder)
    require_unedited(folder, promise)
    _require_one_node(promise)
    if device == "auto":
        _require_gpus(promise, folder)
        device = "cuda"
    with tempfile.TemporaryDirectory(dir=folder.resolve(), prefix=".memc-verify-") as scratch:
        command = ["bash", str(folder.resolve() / LAUNCHER), "--probe", scratch, "--max-steps", str(steps)]
        command += ["--device", "cpu"] if device == "cpu" else []
        command += ["--random-weights"] if random_weights else []
        finished = run_launcher(command, environment=_environment(), timeout_seconds=timeout_seconds, on_line=on_line)
        reports, broken = read_reports(Path(scratch))
    findings = run_findings(finished, reports, broken, promise, device=device, timeout_seconds=timeout_seconds)
    sound = not findings
    if sound and device == "cuda":
        findings = memory_findings(reports, promise)
    verification = judge(
        reports,
        promise,
        device=device,
        steps=steps,
        random_weights=random_weights,
        seconds=finished.seconds,
        diagnostics=findings,
        log_tail=finished.tail,
    )
    if sound:
        append_measurement(promise, verification.measurement())
    return verification


def _require_arguments(device: str, steps: int, timeout_seconds: float) -> None:
    if device not in DEVICES:
        raise usage_error("verify-device", f"device {device!r} is unknown", hint=f"use one of {', '.join(DEVICES)}")
    if steps < 1:
        raise usage_error("verify-steps", f"{steps} steps measure nothing", hint="use --steps 2 or more")
    if timeout_seconds <= 0:
        raise usage_error("verify-timeout", f"a time limit of {timeout_seconds} s leaves no time", hint="use seconds")


def _require_one_node(promise: Promise) -> None:
    nodes = promise.settings.get("nodes", 1)
    if nodes != 1:
        raise usage_error(
            "verify-many-nodes",
            f"the plan spans {nodes} nodes; verification runs on one",
            hint="set hardware.nodes to 1, compile into another folder, and verify that one",
        )


def _require_gpus(promise: Promise, folder: Path) -> None:
    gpus, needed = visible_gpus(), promise.world_size or 1
    if gpus.count == 0:
        raise MemcError((no_gpu(gpus.reason, folder),), ExitCode.VERIFICATION_FAILED)
    if gpus.count < needed:
        raise MemcError((too_few_gpus(gpus.count, needed, folder),), ExitCode.VERIFICATION_FAILED)


def _environment() -> dict[str, str]:
    """Returns the environment for the launcher.

    A memc that was started by its path, out of an environment that is not activated, still finds the frameworks
    beside it; an activated environment decides for itself.
    """
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    if not {"VIRTUAL_ENV", "CONDA_PREFIX"} & environment.keys() and importlib.util.find_spec("torch") is not None:
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return environment
