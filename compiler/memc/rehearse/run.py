"""`rehearse`: run the folder's own launcher on phantom cards, rank by rank, and judge it as `verify` does."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memc.errors import Diagnostic, ExitCode, Location, MemcError, usage_error
from memc.facts import load_gpu
from memc.facts.records import GpuFacts
from memc.rehearse.build import Phantom, phantom
from memc.rehearse.shortfall import named
from memc.rehearse.toolchain import find_toolchain
from memc.verify.attribution import Attribution, ReadSnapshot
from memc.verify.conditions import Conditions, variables_here
from memc.verify.findings import rank_findings
from memc.verify.lock import Promise, read_lock, require_unedited
from memc.verify.measurements import keep
from memc.verify.probe import RankReport, read_reports
from memc.verify.processes import Finished, run_launcher
from memc.verify.shortages import memory_findings
from memc.verify.synthetic import model_folder
from memc.verify.verdict import judge
from memc.verify.verification import Verification

LAUNCHER = "launch.sh"
GRADE = "rehearsed"
NOTES = "notes.txt"
HOST = "host.json"
RAN_OUT = "ran_out.json"
UNKNOWN_HOST_BYTES = 16 << 40
"""Memory of a host that the spec says nothing of: enough for any plan."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A rehearsal's outcome.

    Attributes:
        verification: Judged as a run on the card would be; it has no step time.
        unmodelled: CUDA functions that were called and of which the phantom only says that they succeeded.
    """

    verification: Verification
    unmodelled: tuple[str, ...]


def rehearse(
    folder: Path,
    *,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    ranks: Sequence[str] = ("0", "last"),
    steps: int = 3,
    timeout_seconds: float = 900.0,
    snapshots: Path | None = None,
    read_snapshot: ReadSnapshot | None = None,
    on_line: Callable[[str], None],
) -> Rehearsal:
    """Runs the launcher in `folder` once for each rank, on phantom cards, and returns what torch's allocator counted.

    Nothing is computed and nothing is kept: weights are not drawn, kernels do nothing, checkpoints stay empty. A sound
    rehearsal on the planned card is added to the lock's measurements with the grade ``rehearsed``.

    Args:
        folder: What `memc compile` wrote.
        gpu: Catalogue key of another card than the planned one.
        memory_bytes: How much memory the card has, as torch sees it; None: what the plan or the catalogue says.
        ranks: Numbers of the ranks to play; ``middle`` and ``last`` are those.
        steps: Optimizer steps.
        timeout_seconds: Wall clock for each rank.
        snapshots: Folder for every rank's memory history; None: kept only to say what an allocation failed for.
        read_snapshot: Reads one; None: what memory was for is not said.
        on_line: Called with each line that the launcher prints, on a thread of its own.

    Raises:
        MemcError: Exit 2 for a bad argument, lock or environment, 4 for edited files. What goes wrong after the
            launcher is started stands in the result.
    """
    promise = read_lock(folder)
    require_unedited(folder, promise)
    _require_no_drive(promise)
    numbers = _numbers(ranks, promise.world_size or 1)
    card = _card(promise, gpu)
    card = card if memory_bytes is None else replace(card, capacity_bytes=memory_bytes)
    promise = _on_this_card(promise, card)
    built = phantom(find_toolchain())
    played: list[_Played] = []
    with tempfile.TemporaryDirectory(prefix="memc-rehearse-") as scratch:
        stage = _Stage(
            folder=folder,
            promise=promise,
            steps=steps,
            timeout_seconds=timeout_seconds,
            snapshots=snapshots,
            read_snapshot=read_snapshot,
            scratch=Path(scratch),
            start=model_folder(promise, Path(scratch)),
            capacity_bytes=card.capacity_bytes or 0,
        )
        for rank in numbers:
            environment = _environment(built, card, promise, rank, Path(scratch))
            played.append(stage.play(rank, environment, on_line))
            if played[-1].findings:
                break
        unmodelled = _notes(Path(scratch) / NOTES)
    findings = played[-1].findings
    sound = not findings
    # Seconds of a card that does not exist, and losses of sums that nobody did, say nothing.
    reports = tuple(
        replace(one, step_seconds=(), losses=(), tokens_per_second=None) for ran in played for one in ran.reports
    )
    if sound:
        findings = memory_findings(reports, promise)
    outcome = judge(
        reports,
        promise,
        device="cuda",
        steps=steps,
        random_weights=True,
        seconds=sum(ran.finished.seconds for ran in played),
        diagnostics=findings,
        log_tail=played[-1].finished.tail,
        grade=GRADE,
        conditions=Conditions(variables=variables_here()),
        attributions={rank: found for ran in played for rank, found in ran.attributions.items()},
    )
    if sound and gpu is None and memory_bytes is None:
        outcome = keep(promise, outcome)
    return Rehearsal(verification=outcome, unmodelled=unmodelled)


@dataclass(frozen=True, kw_only=True)
class _Played:
    """What one rank left."""

    finished: Finished
    reports: tuple[RankReport, ...]
    findings: tuple[Diagnostic, ...]
    attributions: dict[int, Attribution]


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Where ranks are played, and how."""

    folder: Path
    promise: Promise
    steps: int
    timeout_seconds: float
    snapshots: Path | None
    read_snapshot: ReadSnapshot | None
    scratch: Path
    start: Path | None
    capacity_bytes: int

    def play(self, rank: int, environment: dict[str, str], on_line: Callable[[str], None]) -> _Played:
        """Returns what the launcher left that was started for one rank."""
        place = self.scratch / f"rank{rank}"
        command = ["bash", str(self.folder.resolve() / LAUNCHER), "--probe", str(place)]
        command += ["--max-steps", str(self.steps), "--random-weights"]
        command += ["--memory-history"] if self.snapshots is not None else []
        finished = run_launcher(
            command,
            environment=environment,
            timeout_seconds=self.timeout_seconds,
            on_line=on_line,
            folder=self.start,
        )
        reports, broken = read_reports(place)
        reports = _with_host(reports, self.scratch / HOST)
        attributions = self._attributions(rank, place / f"rank{rank}.pickle", on_line)
        findings = rank_findings(
            finished,
            reports,
            broken,
            self.promise,
            rank=rank,
            timeout_seconds=self.timeout_seconds,
            attributions=attributions,
        )
        findings = tuple(named(one, self.scratch / RAN_OUT, self.promise, self.capacity_bytes) for one in findings)
        return _Played(finished=finished, reports=reports, findings=findings, attributions=attributions)

    def _attributions(self, rank: int, snapshot: Path, on_line: Callable[[str], None]) -> dict[int, Attribution]:
        """Returns what the rank's snapshot says, by rank; copies it out where it was asked for."""
        if not snapshot.is_file():
            return {}
        if self.snapshots is not None:
            self.snapshots.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(snapshot, self.snapshots / snapshot.name)
        if self.read_snapshot is None:
            return {}
        try:
            return {rank: self.read_snapshot(snapshot.read_bytes())}
        except (MemcError, ValueError) as error:
            on_line(f"memc: {snapshot.name} says nothing: {error}")
            return {}


def _numbers(ranks: Sequence[str], world_size: int) -> tuple[int, ...]:
    """Returns the ranks to play, each once, in order.

    Raises:
        MemcError: For what is no rank of this run.
    """
    found = []
    for text in ranks:
        named = {"middle": world_size // 2, "last": world_size - 1}
        number = named[text] if text in named else int(text) if text.isdecimal() else -1
        if not 0 <= number < world_size:
            hint = f"use numbers from 0 to {world_size - 1}, `middle` or `last`, with commas between them"
            raise usage_error("rehearse-ranks", f"{text!r} is no rank of a run with {world_size}", hint=hint)
        found.append(number)
    return tuple(dict.fromkeys(found))


def _require_no_drive(promise: Promise) -> None:
    """Raises MemcError (exit 2) where a plan swaps to a drive: DeepSpeed empties its folder there as it starts.

    Source: deepspeed runtime/swap_tensor/partitioned_param_swapper.py and partitioned_optimizer_swapper.py, rmtree.
    """
    swapped = [name for name in ("offload_optimizer", "offload_param") if promise.settings.get(name) == "nvme"]
    if swapped:
        names = ", ".join(swapped)
        message = f"the plan keeps states on a drive ({names}): starting it would empty DeepSpeed's folder there"
        hint = "rehearse the same spec with that part in host memory (offload to cpu), or verify on the planned machine"
        where = Location(file=str(promise.path), field="plan.settings")
        diagnostic = Diagnostic(code="rehearse-drive", message=message, where=where, hint=hint)
        raise MemcError((diagnostic,), ExitCode.USAGE)


def _card(promise: Promise, gpu: str | None) -> GpuFacts:
    """Returns the facts of the card to play.

    Raises:
        MemcError: When the card is unknown, not NVIDIA's, or something that torch reads of it is unknown.
    """
    document = json.loads(promise.path.read_text(encoding="utf-8"))
    card = load_gpu(gpu or str(document["hardware"]["gpu"]))
    if gpu is None:
        card = replace(card, capacity_bytes=int(document["hardware"]["capacity_bytes"]))
    lacking = [
        name
        for name, value in (
            ("compute_capability", card.compute_capability),
            ("capacity_mib", card.capacity_bytes),
            ("multiprocessors", card.multiprocessors),
        )
        if value is None
    ]
    if lacking:
        message = f"{card.name} cannot be played: the catalogue does not know its {', '.join(lacking)}"
        hint = "rehearse on a card of the same generation and size with --gpu; `memc gpus` lists what is known"
        where = Location(file=str(promise.path), field="hardware.gpu")
        raise MemcError((Diagnostic(code="rehearse-card", message=message, where=where, hint=hint),), ExitCode.USAGE)
    return card


def _environment(built: Phantom, card: GpuFacts, promise: Promise, rank: int, scratch: Path) -> dict[str, str]:
    """Returns the launcher's environment: a card, a rank, and an `accelerate` that plays it."""
    programs = scratch / "bin"
    programs.mkdir(exist_ok=True)
    shim = programs / "accelerate"
    launcher = Path(__file__).with_name("launcher.py")
    loader = built.environment(os.environ.get("LD_LIBRARY_PATH", ""))
    started = ["env", *(f"{name}={value}" for name, value in loader.items()), sys.executable, str(launcher)]
    shim.write_text(f'#!/bin/sh\nexec {shlex.join(started)} "$@"\n', encoding="utf-8")
    shim.chmod(0o700)
    major, minor = card.compute_capability or (0, 0)
    cards = promise.settings.get("gpus_per_node", 1)
    described = (cards, card.capacity_bytes, promise.outside_allocator_bytes, major, minor, card.multiprocessors)
    own = {
        "HF_HUB_OFFLINE": "1",
        "MEMC_PHANTOM": "|".join([*map(str, described), card.name]),
        "MEMC_PHANTOM_NOTES": str(scratch / NOTES),
        "MEMC_PHANTOM_HOST": str(_host_bytes(promise)),
        "MEMC_PHANTOM_HOST_REPORT": str(scratch / HOST),
        "MEMC_PHANTOM_RAN_OUT": str(scratch / RAN_OUT),
        "MEMC_PHANTOM_RANK": str(rank),
        "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        # What this machine has must not reach the script: its cards are not the planned ones.
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(cards)))),
        # Of a job with several nodes, one process plays its rank alone.
        "MACHINE_RANK": str(rank // int(cards)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    return {**os.environ, **own}


def _on_this_card(promise: Promise, card: GpuFacts) -> Promise:
    """Returns the promise with the budget that the plan's reserve leaves of the card that is played."""
    document = json.loads(promise.path.read_text(encoding="utf-8"))
    left = (card.capacity_bytes or 0) - int(document["budget"].get("reserve_bytes") or 0)
    return replace(promise, budget_bytes=min(promise.budget_bytes, left))


def _host_bytes(promise: Promise) -> int:
    """Returns the memory of the planned host, by which the script decides whether to start."""
    document = json.loads(promise.path.read_text(encoding="utf-8"))
    return int(document["budget"].get("host_bytes") or UNKNOWN_HOST_BYTES)


def _with_host(reports: tuple[RankReport, ...], path: Path) -> tuple[RankReport, ...]:
    """Returns the reports with what the planned host would hold: pages that were never touched here, pinned memory.

    Pinned memory is resident where it is real. Each counts at its own largest: that they coincide is assumed.
    """
    try:
        sizes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return reports
    path.unlink()
    return tuple(
        replace(
            report,
            host_rss_peak_bytes=(report.host_rss_peak_bytes or 0)
            + int(sizes["untouched_bytes"])
            + int(sizes["pinned_bytes"]),
            host_pinned_peak_bytes=int(sizes["pinned_bytes"]),
        )
        for report in reports
    )


def _notes(path: Path) -> tuple[str, ...]:
    """Returns the functions that were used without being modelled, each once."""
    try:
        return tuple(sorted(set(path.read_text(encoding="utf-8").split())))
    except OSError:
        return ()
