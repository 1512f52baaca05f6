"""From a spec's path to an answer, and from a plan to files: the only reader and writer of an output folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memc.config import Task
from memc.document import LOCK_SCHEMA, explain_document, lock_digest, lock_document, record_document
from memc.errors import Diagnostic, ExitCode, Location, MemcError, usage_error
from memc.facts import GpuFacts, ModelFacts, load_gpu, load_model
from memc.facts.calibration import calibrated, calibration_of, file_calibration, planned
from memc.facts.classifiers import as_classifier
from memc.plan import Infeasible, Plan
from memc.solver import solve
from memc.spec import LoadedSpec, load_spec
from memc.unwritten import priced_only

if TYPE_CHECKING:
    from memc.certify import TraceProcess
    from memc.certify.room import Room
    from memc.ledger.traced import TracedStep

LOCK_NAME = "memc.lock"
_LAUNCHER_MODE = 0o755


class Change(StrEnum):
    """What writing would do to one file."""

    CREATE = "create"
    UPDATE = "update"
    IDENTICAL = "identical"
    EDITED = "edited by hand"
    FOREIGN = "not written by memc"
    LEFT_OVER = "left over"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A spec and what became of it.

    Attributes:
        loaded: The spec.
        result: A plan, or a refusal.
        traces: Traces that decided the plan, its own first; kept in the lock.
        notes: Why the plan is estimated only, where a trace was asked for.
        room: What is kept free for a measurement, and in the lock; None when nothing is.
    """

    loaded: LoadedSpec
    result: Plan | Infeasible
    traces: tuple[TracedStep, ...] = ()
    notes: tuple[str, ...] = ()
    room: Room | None = None

    def measured_notes(self, folder: Path) -> list[str]:
        """Returns what to say of figures of the user's own: that they were used, or that the folder's lock had others.

        Args:
            folder: The output folder.
        """
        own, lock = self.result.gpu.calibration, _read_lock(folder) or {}
        notes = []
        if own is not None:
            notes.append(f"{len(own.figures)} figures measured on {self.result.gpu.key} were used ({own.origin})")
        before = calibration_of(lock.get("calibration"))
        if before is not None and own is None:
            notes.append(
                f"{folder / LOCK_NAME} was planned with figures measured on a user's own {self.result.gpu.key} "
                f"({before.origin}), which are not here or switched off: the catalogue's are used"
            )
        return notes

    def document(self) -> dict[str, Any]:
        """Returns the `memc/explain/1` document."""
        spec = self.loaded.spec
        return explain_document(self.result, spec_digest=spec.digest(), resolved=spec.resolved())


@dataclass(frozen=True, kw_only=True)
class Written:
    """What `write` did, or would do.

    Attributes:
        folder: The output folder.
        changes: Change by relative path, sorted.
    """

    folder: Path
    changes: dict[str, Change]

    @property
    def current(self) -> bool:
        """Whether the folder already is what the spec yields."""
        return all(change is Change.IDENTICAL for change in self.changes.values())


def answer(
    spec_path: Path, *, folder: Path | None = None, process: TraceProcess | None = None, certify_seconds: float = 0
) -> Answer:
    """Returns the plan of the spec at `spec_path`, or the refusal.

    Args:
        spec_path: The spec.
        folder: Output folder whose lock may hold traces from earlier.
        process: Traces the plan; with None, only traces from earlier count.
        certify_seconds: How long that may take.

    Raises:
        MemcError: When the spec is invalid, names unknown things, or contradicts the facts.
    """
    return answer_of(load_spec(spec_path), folder=folder, process=process, certify_seconds=certify_seconds)


def answer_of(
    loaded: LoadedSpec,
    *,
    folder: Path | None = None,
    process: TraceProcess | None = None,
    certify_seconds: float = 0,
    room: Room | None = None,
) -> Answer:
    """Returns the plan of a spec that was read, or the refusal; arguments are those of `answer`.

    With `room`, so much is kept free of each GPU's budget; with None, what the folder's lock keeps.

    Raises:
        MemcError: When the spec names unknown things, or contradicts the facts.
    """
    gpu, model = facts_of(loaded)
    samples, evaluation = count_samples(loaded), count_evaluation_samples(loaded)

    def solved(margin_bytes: int) -> Plan | Infeasible:
        try:
            return solve(loaded, model, gpu, samples, evaluation_samples=evaluation, margin_bytes=margin_bytes)
        except MemcError as error:
            if error.diagnostics[0].code != "fact-unknown":
                raise
            raise MemcError(tuple(_placed(loaded, "hardware.gpu", error)), error.exit_code) from error

    room = room or (None if folder is None else _kept_room(folder, loaded))
    solver: Callable[[int], Plan | Infeasible] = solved
    if room is not None:
        from memc.certify.room import with_room

        solver = with_room(solved, room)

    def settled_reserve(result: Plan | Infeasible) -> Plan | Infeasible:
        if gpu.calibration is None:
            return result
        from memc.certify.reserve import with_measured_reserve

        return with_measured_reserve(solver, result)

    known = _kept_traces(folder) if folder is not None else []
    if not known and process is None:
        return Answer(loaded=loaded, result=settled_reserve(solver(0)), room=room)
    from memc.certify import certified_answer  # what most commands do without

    settled = certified_answer(solver, loaded.spec.model, _base(loaded.path), known, process, certify_seconds)
    result = settled_reserve(settled.result)
    return Answer(loaded=loaded, result=result, traces=settled.traces, notes=settled.notes, room=room)


def facts_of(loaded: LoadedSpec) -> tuple[GpuFacts, ModelFacts]:
    """Returns the facts of the spec's card and model.

    Raises:
        MemcError: When either is unknown, or the ledger does not describe the model's family; at the spec's field.
    """
    gpu, model = _facts(loaded)
    if model.unpriced:
        problem = loaded.diagnostic(
            "model",
            "family-not-priced",
            f"parameters of model_type {model.model_type!r} can be counted, but {model.unpriced}",
            "memc models lists the models that can be priced",
        )
    else:
        return gpu, model
    raise MemcError((problem,))


def answers(
    spec_paths: Iterable[Path], folders: Iterable[Path | None] | None = None, *, certify_seconds: float = 0
) -> list[Answer]:
    """Returns the answer of every spec.

    Args:
        spec_paths: The specs.
        folders: Their output folders, whose locks may hold traces from earlier; None when there are none.
        certify_seconds: How long tracing each plan may take; with 0, only traces from earlier count.

    Raises:
        MemcError: With the errors of all specs that have one.
    """
    found: list[Answer] = []
    problems: list[MemcError] = []
    paths = list(spec_paths)
    with contextlib.ExitStack() as stack:
        process = None
        if certify_seconds:
            from memc.certify import TraceProcess  # what most commands do without

            process = stack.enter_context(TraceProcess())
        for path, folder in zip(paths, folders or [None] * len(paths), strict=True):
            try:
                found.append(answer(path, folder=folder, process=process, certify_seconds=certify_seconds))
            except MemcError as error:
                problems.append(error)
    if problems:
        diagnostics = dict.fromkeys(item for error in problems for item in error.diagnostics)
        raise MemcError(tuple(diagnostics), problems[0].exit_code)
    return found


def spec_path_of(path: Path) -> Path:
    """Returns the spec that `path` stands for: itself, or the one that its memc.lock was compiled from.

    Raises:
        MemcError: When a folder has no lock, or the spec it names is gone.
    """
    if not path.is_dir():
        return path
    lock = _read_lock(path)
    if lock is None:
        raise usage_error(
            "no-lock",
            f"{path} holds no {LOCK_NAME}",
            where=Location(file=str(path)),
            hint="name a spec, or a folder that memc compile wrote",
        )
    named = lock.get("spec")
    relative = str(named.get("path", "")) if isinstance(named, dict) else ""
    spec = path / relative
    if not relative or not spec.is_file():
        raise usage_error(
            "spec-gone",
            f"{path / LOCK_NAME} was compiled from {relative or 'an unnamed spec'}, which is not there",
            where=Location(file=str(path / LOCK_NAME)),
            hint="name the spec itself",
        )
    return spec


def count_samples(loaded: LoadedSpec) -> int | None:
    """Returns the training samples: the lines of a JSONL file beside the spec, else what it says; None when unknown.

    The run reads the file that is there, so that `data.samples` speaks only of one that is elsewhere. A relative path
    is looked up beside the spec alone, so that the answer does not depend on the current folder.
    """
    data = loaded.spec.data
    counted = None if data.train is None else _lines(loaded, data.train)
    return data.samples if counted is None else counted


def count_evaluation_samples(loaded: LoadedSpec) -> int | None:
    """Returns the samples of one evaluation: the lines of a local JSONL file; None when unknown, or without one."""
    return None if loaded.spec.data.eval is None else _lines(loaded, loaded.spec.data.eval)


def _lines(loaded: LoadedSpec, name: str) -> int | None:
    """Returns the lines of a JSONL file beside the spec that are not empty; None of anything else."""
    path = _base(loaded.path) / name
    if path.suffix != ".jsonl":
        return None
    # A name that the file system does not take, or a file that may not be read, leaves the amount unknown.
    with contextlib.suppress(OSError, ValueError):
        if path.is_file():
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
    return None


def generate(solved: Answer, folder: Path, command: str) -> dict[str, str]:
    """Returns every file of the output folder, memc.lock included, by relative path.

    Raises:
        MemcError: When the plan prices something that memc does not render, or the spec's name is no UTF-8 text.
    """
    from memc.render import render  # loads Jinja, which explaining does without

    plan, loaded = solved.result, solved.loaded
    assert isinstance(plan, Plan)
    if found := priced_only(loaded, plan):
        raise MemcError(tuple(found))
    if not _is_unicode(command):
        raise usage_error(
            "name-not-utf8",
            f"the path of spec or folder is not UTF-8, so no file can name it: {command!a}",
            hint="rename the spec or the folder",
        )
    files = render(plan, spec_name=loaded.name, command=command)
    digests = {name: _sha256(text) for name, text in files.items()}
    lock = lock_document(
        plan,
        spec_digest=loaded.spec.digest(),
        resolved=loaded.spec.resolved(),
        files=digests,
        command=command,
    )
    lock["spec"]["path"] = _relative(loaded.path, folder)
    lock["measurements"] = _kept_measurements(folder, lock)
    if solved.traces:
        lock["traces"] = [record_document(step) for step in solved.traces]
    if solved.room is not None:
        lock["kept_free"] = solved.room.document()
    left_over = _left_over(folder, files)
    if left_over:
        lock["left_over"] = left_over
    lock["digest"] = lock_digest(lock)
    files[LOCK_NAME] = json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return dict(sorted(files.items()))


def compile_command(spec_path: Path, folder: Path) -> str:
    """Returns the command that writes a folder again, run from the folder that holds the spec."""
    return f"memc compile {shlex.quote(spec_path.name)} -o {shlex.quote(_relative(folder, spec_path.parent))}"


def compare(files: dict[str, str], folder: Path) -> Written:
    """Returns what writing `files` into `folder` would do to each of them."""
    recorded = _recorded(folder)
    changes = {name: _change(folder / name, text, recorded.get(name), name) for name, text in files.items()}
    changes |= dict.fromkeys(_left_over(folder, files), Change.LEFT_OVER)
    return Written(folder=folder, changes=dict(sorted(changes.items())))


def write(folders: Mapping[Path, dict[str, str]], *, force: bool = False, keep: Iterable[Path] = ()) -> list[Written]:
    """Writes the files of every folder, all or nothing, and returns what was done in each.

    Every file is decided on before the first is written; each is written beside its place and renamed, the lock of a
    folder last, so that a compile that was cut off can be run again. Files that an earlier compile wrote and this one
    does not are reported and left where they are.

    Args:
        folders: Text by relative path, by output folder.
        force: Whether files that were edited by hand, or that memc never wrote, may be overwritten.
        keep: Paths that are never overwritten: the specs.

    Raises:
        MemcError: With exit code 4 when files were edited by hand and `force` is not set; with exit code 2 when a
            folder cannot be written.
    """
    outcomes = [compare(files, folder) for folder, files in folders.items()]
    obstacles = [
        problem for outcome in outcomes for problem in _obstacles(outcome, {os.path.realpath(path) for path in keep})
    ]
    if obstacles:
        raise MemcError(tuple(obstacles))
    edited = [
        _edited(outcome.folder, name, change)
        for outcome in outcomes
        for name, change in outcome.changes.items()
        if change in (Change.EDITED, Change.FOREIGN)
    ]
    if edited and not force:
        raise MemcError(tuple(edited), ExitCode.STALE)
    pending = [
        (outcome.folder / name, text)
        for outcome in outcomes
        for name, text in folders[outcome.folder].items()
        if outcome.changes[name] is not Change.IDENTICAL
    ]
    _write_all(sorted(pending, key=lambda item: item[0].name == LOCK_NAME))
    return outcomes


def _write_all(files: list[tuple[Path, str]]) -> None:
    """Writes every file to a temporary name first, then renames them in their order.

    Raises:
        MemcError: ``cannot-write`` when a folder or file cannot be written; nothing has been renamed then, unless the
            renaming itself failed.
    """
    staged: list[tuple[Path, Path]] = []
    target = Path()
    try:
        for target, text in files:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            staged.append((Path(temporary), target))
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
            Path(temporary).chmod(_LAUNCHER_MODE if target.suffix == ".sh" else 0o644)
        while staged:
            written, target = staged[0]
            written.replace(target)
            staged.pop(0)
    except OSError as error:
        raise usage_error(
            "cannot-write",
            f"{target.parent} cannot be written: {error.strerror or error}",
            where=Location(file=str(target)),
            hint="name a folder that you may write to",
        ) from error
    finally:
        for written, _ in staged:
            written.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, keep: Path) -> None:
    """Writes one file that a person asked for by name, whole or not at all; `keep`, the spec, is never overwritten.

    Raises:
        MemcError: ``in-the-way`` when the path is a folder or the spec, ``cannot-write`` when it cannot be written.
    """
    outcome = Written(folder=path.parent, changes={path.name: Change.CREATE})
    obstacles = _obstacles(outcome, {os.path.realpath(keep)})
    if obstacles:
        raise MemcError(tuple(obstacles))
    _write_all([(path, text)])


def _obstacles(outcome: Written, keep: set[str]) -> list[Diagnostic]:
    """Returns what stands in the way of files and is never overwritten: folders, and the specs themselves."""
    found = []
    for name in outcome.changes:
        path = outcome.folder / name
        if path.is_dir() and not path.is_symlink():
            message, hint = f"{name} is a folder there", "move it away, or name another folder with -o"
        elif os.path.realpath(path) in keep:
            message, hint = f"{name} is the spec itself", "rename the spec, or name another folder with -o"
        else:
            continue
        found.append(Diagnostic(code="in-the-way", message=message, where=Location(file=str(path)), hint=hint))
    return found


def _recorded(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file that memc wrote into a folder, by relative path."""
    lock = _read_lock(folder) or {}
    known = {**_digests(lock.get("left_over")), **_digests(lock.get("files"))}
    return {name: digest for name, digest in known.items() if _inside(name)}


def _digests(table: Any) -> dict[str, str]:
    return table if isinstance(table, dict) else {}


def _left_over(folder: Path, files: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of files that memc wrote into a folder earlier, and that are not among `files` now."""
    names = set(files)
    known = sorted(_recorded(folder).items())
    return {name: digest for name, digest in known if name not in names and (folder / name).is_file()}


def _change(path: Path, text: str, recorded: str | None, name: str) -> Change:
    """Returns what writing would do to one file."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return Change.FOREIGN
    if not path.is_file():
        return Change.CREATE
    present = path.read_bytes()
    if present == text.encode():
        return Change.IDENTICAL
    if name == LOCK_NAME:
        return Change.UPDATE if _lock_schema(present) == LOCK_SCHEMA else Change.FOREIGN
    if recorded is None:
        return Change.FOREIGN
    return Change.UPDATE if hashlib.sha256(present).hexdigest() == recorded else Change.EDITED


def _edited(folder: Path, name: str, change: Change) -> Diagnostic:
    if change is Change.EDITED:
        message = f"{name} was edited by hand since memc wrote it"
        hint = "move the change into the spec, or compile with --force to overwrite it"
    else:
        message = f"{name} is there already and was not written by memc"
        hint = "choose another folder with -o, or compile with --force to overwrite it"
    return Diagnostic(code="would-overwrite", message=message, where=Location(file=str(folder / name)), hint=hint)


def _kept_measurements(folder: Path, lock: dict[str, Any]) -> list[Any]:
    """Returns the measurements of the folder's lock when they belong to the same plan, else none."""
    old = _read_lock(folder)
    if old is None or old.get("plan", {}).get("settings") != json.loads(json.dumps(lock["plan"]["settings"])):
        return []
    if old.get("model") != json.loads(json.dumps(lock["model"])) or old.get("hardware") != lock["hardware"]:
        return []
    kept = old.get("measurements", [])
    return kept if isinstance(kept, list) else []


def _kept_traces(folder: Path) -> list[Any]:
    """Returns the traces that the lock of a folder holds, as they are written there."""
    kept = (_read_lock(folder) or {}).get("traces", [])
    return kept if isinstance(kept, list) else []


def _kept_room(folder: Path, loaded: LoadedSpec) -> Room | None:
    """Returns what the lock of a folder keeps free for a measurement of this spec; None when nothing."""
    kept = (_read_lock(folder) or {}).get("kept_free")
    if kept is None:
        return None
    from memc.certify.room import room_of

    return room_of(kept, loaded.spec.digest())


def _read_lock(folder: Path) -> dict[str, Any] | None:
    """Returns the lock of a folder; None when there is none or it is not one of memc's."""
    path = folder / LOCK_NAME
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if _lock_schema(content) != LOCK_SCHEMA:
        return None
    lock: dict[str, Any] = json.loads(content)
    return lock if isinstance(lock.get("files"), dict) else None


def _lock_schema(content: bytes) -> str | None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document.get("schema") if isinstance(document, dict) else None


def _inside(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


def _facts(loaded: LoadedSpec) -> tuple[GpuFacts, ModelFacts]:
    """Returns the facts of the spec's card and model; what is wrong with either is shown at its field."""
    spec, base = loaded.spec, _base(loaded.path)
    found: list[Diagnostic] = []
    try:
        model = load_model(spec.model, base_dir=base)
        if spec.task is Task.CLASSIFICATION:
            model = as_classifier(model, spec.data.classes)
    except MemcError as error:
        found += _placed(loaded, "model", error)
    try:
        gpu = load_gpu(spec.hardware.gpu)
    except MemcError as error:
        found += _placed(loaded, "hardware.gpu", error)
    else:
        try:
            gpu = _as_measured(loaded, gpu)
        except MemcError as error:
            found += _placed(loaded, "hardware.file" if spec.hardware.file else "hardware.gpu", error)
    if found:
        raise MemcError(tuple(found))
    return gpu, model


def _as_measured(loaded: LoadedSpec, gpu: GpuFacts) -> GpuFacts:
    """Returns a card's facts with what the spec's hardware file says of it, else with what the user measured on it."""
    named = loaded.spec.hardware.file
    if named is None:
        return planned(gpu)
    return calibrated(gpu, file_calibration(_base(loaded.path) / named, named, gpu.key))


def _placed(loaded: LoadedSpec, field: str, error: MemcError) -> list[Diagnostic]:
    """Returns the diagnostics of an error; the first is shown at a field of the spec."""
    first, *rest = error.diagnostics
    return [loaded.diagnostic(field, first.code, first.message, first.hint), *rest]


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _base(spec_path: Path) -> Path:
    return spec_path.parent


def _relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path.resolve(), start.resolve())).as_posix()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def stale(outcomes: Iterable[Written]) -> list[Diagnostic]:
    """Returns one diagnostic for each file that is not what its spec yields."""
    return [
        Diagnostic(
            code="stale",
            message=f"{name} is not what the spec yields ({change})",
            where=Location(file=str(outcome.folder / name)),
            hint="delete it, then run memc compile again" if change is Change.LEFT_OVER else "run memc compile again",
        )
        for outcome in outcomes
        for name, change in outcome.changes.items()
        if change is not Change.IDENTICAL
    ]
