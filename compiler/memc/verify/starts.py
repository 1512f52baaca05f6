"""The starts of a folder's launcher that one verification takes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from memc.errors import Diagnostic, MemcError
from memc.verify.attribution import Attribution, ReadSnapshot
from memc.verify.findings import run_findings
from memc.verify.lock import Promise
from memc.verify.probe import RankReport, read_reports
from memc.verify.processes import Finished, run_launcher
from memc.verify.synthetic import model_folder

LAUNCHER = "launch.sh"
STEPS_ON_A_CARD, STEPS_ON_A_CPU = 4, 2
SETTLE_STEPS = 12
RESUMED_PHASES = ("resume", "resumed_step")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to run a folder.

    Attributes:
        device: One of `DEVICES`.
        steps: Optimizer steps; None: `STEPS_ON_A_CARD` or `STEPS_ON_A_CPU`.
        settle_steps: At most so many more, until reserved memory stops growing.
        timeout_seconds: Wall clock after which everything is ended.
        random_weights: Whether to build the model from its config alone (memory and time are the same).
        resume: Whether to go on from the checkpoint in new processes, as a run does that was interrupted.
        snapshots: Folder for every rank's memory history; None: kept only to say what an allocation failed for.
        read_snapshot: Reads one; None: what memory was for is not said.
    """

    device: str = "auto"
    steps: int | None = None
    settle_steps: int = SETTLE_STEPS
    timeout_seconds: float = 900.0
    random_weights: bool = False
    resume: bool = True
    snapshots: Path | None = None
    read_snapshot: ReadSnapshot | None = None

    @property
    def least_steps(self) -> int:
        """Optimizer steps that are made in any case."""
        if self.steps is not None:
            return self.steps
        return STEPS_ON_A_CPU if self.device == "cpu" else STEPS_ON_A_CARD


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one start of the launcher left."""

    finished: Finished
    reports: tuple[RankReport, ...]
    findings: tuple[Diagnostic, ...]
    attributions: dict[int, Attribution]


@dataclass(frozen=True)
class Starts:
    """The starts of a folder's launcher that one verification takes."""

    folder: Path
    promise: Promise
    settings: Settings
    ranks: range
    scratch: Path
    on_line: Callable[[str], None]

    def run(self) -> Ran:
        """Returns what the run left; with its last checkpoint resumed, where one is made and all ranks can read it."""
        settings = self.settings
        resumes = settings.resume and self.promise.saves and self.promise.nodes == 1
        extra = ["--settle", str(settings.settle_steps)] if settings.settle_steps else []
        extra += ["--keep-checkpoints"] if resumes else []
        first = self._start(settings.least_steps, extra, settings.timeout_seconds)
        left = settings.timeout_seconds - first.finished.seconds
        if first.findings or not resumes or left <= 0:
            return first
        made = max((len(report.step_seconds) for report in first.reports), default=0)
        second = self._start(made + 1, ["--resume"], left)
        both = Finished(
            exit_code=second.finished.exit_code,
            seconds=first.finished.seconds + second.finished.seconds,
            tail=second.finished.tail,
        )
        reports = first.reports if second.findings else _with_resumed(first.reports, second.reports)
        attributions = first.attributions | second.attributions
        return Ran(finished=both, reports=reports, findings=second.findings, attributions=attributions)

    def _start(self, steps: int, extra: list[str], timeout_seconds: float) -> Ran:
        settings = self.settings
        command = ["bash", str(self.folder.resolve() / LAUNCHER), "--probe", str(self.scratch)]
        command += ["--max-steps", str(steps), *extra]
        command += ["--device", "cpu"] if settings.device == "cpu" else []
        command += ["--random-weights"] if settings.random_weights else []
        command += ["--memory-history"] if settings.snapshots is not None else []
        environment = _environment()
        place = model_folder(self.promise, self.scratch) if settings.random_weights else None
        if place is not None:
            environment["HF_HUB_OFFLINE"] = "1"
        for old in self.scratch.glob("rank*"):
            old.unlink()
        finished = run_launcher(
            command, environment=environment, timeout_seconds=timeout_seconds, on_line=self.on_line, folder=place
        )
        reports, broken = read_reports(self.scratch)
        attributions = self._snapshots("resumed-" if "--resume" in extra else "")
        findings = run_findings(
            finished,
            reports,
            broken,
            self.promise,
            device=settings.device,
            timeout_seconds=settings.timeout_seconds,
            ranks=self.ranks,
            attributions=attributions,
        )
        return Ran(finished=finished, reports=reports, findings=findings, attributions=attributions)

    def _snapshots(self, prefix: str) -> dict[int, Attribution]:
        """Returns what each snapshot says; copies them out where they were asked for."""
        found = {}
        for path in sorted(self.scratch.glob("rank*.pickle")):
            if self.settings.snapshots is not None:
                self.settings.snapshots.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, self.settings.snapshots / f"{prefix}{path.name}")
            if self.settings.read_snapshot is not None:
                try:
                    found[int(path.stem.removeprefix("rank"))] = self.settings.read_snapshot(path.read_bytes())
                except (MemcError, ValueError) as error:
                    self.on_line(f"memc: {path.name} says nothing: {error}")
        return found


def _with_resumed(first: tuple[RankReport, ...], second: tuple[RankReport, ...]) -> tuple[RankReport, ...]:
    """Returns the reports of a run with the phases of its continuation, and the larger peaks of the host."""
    later = {report.rank: report for report in second}
    joined = []
    for report in first:
        other = later.get(report.rank)
        if other is not None:
            phases = {name: peak for name, peak in other.phases.items() if name in RESUMED_PHASES}
            report = replace(
                report,
                phases={**report.phases, **phases},
                device_used_bytes=_largest(report.device_used_bytes, other.device_used_bytes),
                host_rss_peak_bytes=_largest(report.host_rss_peak_bytes, other.host_rss_peak_bytes),
                host_pinned_peak_bytes=_largest(report.host_pinned_peak_bytes, other.host_pinned_peak_bytes),
            )
        joined.append(report)
    return tuple(joined)


def _largest(*sizes: int | None) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


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
