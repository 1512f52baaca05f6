"""From a spec's path to an answer, and from a plan to files: the only reader and writer of an output folder."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from memc.config import LossHead, Task
from memc.document import LOCK_SCHEMA, explain_document, lock_document
from memc.errors import Diagnostic, ExitCode, Location, MemcError, usage_error
from memc.facts import ledger_described, load_gpu, load_model
from memc.plan import Infeasible, Plan
from memc.render import render
from memc.solver import solve
from memc.spec import LoadedSpec, load_spec

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
    """

    loaded: LoadedSpec
    result: Plan | Infeasible

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


def answer(spec_path: Path) -> Answer:
    """Returns the plan of the spec at `spec_path`, or the refusal.

    Raises:
        MemcError: When the spec is invalid, names unknown things, or contradicts the facts.
    """
    loaded = load_spec(spec_path)
    gpu = _placed(loaded, "hardware.gpu", lambda: load_gpu(loaded.spec.hardware.gpu))
    model = _placed(loaded, "model", lambda: load_model(loaded.spec.model, base_dir=_base(spec_path)))
    if not ledger_described(model.model_type):
        raise MemcError(
            (
                loaded.diagnostic(
                    "model",
                    "family-not-priced",
                    f"parameters of model_type {model.model_type!r} can be counted, but its activations are not "
                    "described yet",
                    "memc models lists the models that can be priced",
                ),
            )
        )
    return Answer(loaded=loaded, result=solve(loaded, model, gpu, count_samples(loaded)))


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
    relative = str(lock.get("spec", {}).get("path", ""))
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
    """Returns the training samples: what the spec says, else the lines of a local JSONL file; None when unknown.

    A relative path is looked up beside the spec, then in the current folder.
    """
    data = loaded.spec.data
    if data.samples is not None or data.train is None:
        return data.samples
    for folder in (_base(loaded.path), Path()):
        path = folder / data.train
        if path.suffix == ".jsonl" and path.is_file():
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
    return None


def generate(solved: Answer, folder: Path, command: str) -> dict[str, str]:
    """Returns every file of the output folder, memc.lock included, by relative path.

    Raises:
        MemcError: When the plan prices something that memc does not render.
    """
    plan, loaded = solved.result, solved.loaded
    assert isinstance(plan, Plan)
    if plan.config.task is Task.SFT and plan.config.loss is LossHead.PLAIN:
        raise MemcError(
            (
                loaded.diagnostic(
                    "pin.loss",
                    "not-rendered",
                    "TRL's SFTTrainer always computes the loss in chunks: a plain loss can be priced, not rendered",
                    "remove pin.loss, or look at the price alone with memc explain",
                ),
            )
        )
    if not plan.run.train_data:
        raise MemcError(
            (
                loaded.diagnostic(
                    "data.train",
                    "no-training-file",
                    "data.train is not given: there is nothing that train.py could read",
                    "name the training file; data.samples alone is enough for memc explain",
                ),
            )
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
    files[LOCK_NAME] = json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return dict(sorted(files.items()))


def compile_command(spec_path: Path, folder: Path) -> str:
    """Returns the command that writes a folder again, run from the folder that holds the spec."""
    return f"memc compile {shlex.quote(spec_path.name)} -o {shlex.quote(_relative(folder, spec_path.parent))}"


def compare(files: dict[str, str], folder: Path) -> Written:
    """Returns what writing `files` into `folder` would do to each of them."""
    lock = _read_lock(folder) if folder.is_dir() else None
    recorded: dict[str, str] = dict(lock.get("files", {})) if lock is not None else {}
    changes = {name: _change(folder / name, text, recorded.get(name), name) for name, text in files.items()}
    for name in recorded:
        if name not in files and _inside(name) and (folder / name).is_file():
            changes[name] = Change.LEFT_OVER
    return Written(folder=folder, changes=dict(sorted(changes.items())))


def write(files: dict[str, str], folder: Path, *, force: bool = False) -> Written:
    """Writes `files` into `folder`, all or nothing, and returns what was done.

    Each file is written beside its place and renamed; nothing is written when any file was edited by hand. Files that
    an earlier compile wrote and this one does not are reported and left where they are.

    Raises:
        MemcError: With exit code 4 when files were edited by hand and `force` is not set; with exit code 2 when the
            folder cannot be written.
    """
    outcome = compare(files, folder)
    edited = [name for name, change in outcome.changes.items() if change in (Change.EDITED, Change.FOREIGN)]
    if edited and not force:
        raise MemcError(tuple(_edited(folder, name, outcome.changes[name]) for name in edited), ExitCode.STALE)
    pending = [name for name in files if outcome.changes[name] is not Change.IDENTICAL]
    try:
        _write_all({name: files[name] for name in pending}, folder)
    except OSError as error:
        raise usage_error(
            "cannot-write",
            f"{folder} cannot be written: {error.strerror or error}",
            where=Location(file=str(folder)),
            hint="name a folder that you may write to",
        ) from error
    return outcome


def _write_all(files: dict[str, str], folder: Path) -> None:
    """Writes every file to a temporary name first, then renames them all."""
    folder.mkdir(parents=True, exist_ok=True)
    staged: list[tuple[Path, Path]] = []
    try:
        for name, text in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            staged.append((Path(temporary), target))
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
            mode = _LAUNCHER_MODE if target.suffix == ".sh" else 0o644
            Path(temporary).chmod(mode)
        while staged:
            temporary_path, target = staged[0]
            temporary_path.replace(target)
            staged.pop(0)
    finally:
        for temporary_path, _ in staged:
            temporary_path.unlink(missing_ok=True)


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
    old = _read_lock(folder) if folder.is_dir() else None
    if old is None or old.get("plan", {}).get("settings") != json.loads(json.dumps(lock["plan"]["settings"])):
        return []
    if old.get("model") != json.loads(json.dumps(lock["model"])) or old.get("hardware") != lock["hardware"]:
        return []
    kept = old.get("measurements", [])
    return kept if isinstance(kept, list) else []


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


def _placed(loaded: LoadedSpec, field: str, load: Any) -> Any:
    """Returns what `load` returns; its errors are shown at a field of the spec."""
    try:
        return load()
    except MemcError as error:
        first = error.diagnostics[0]
        placed = loaded.diagnostic(field, first.code, first.message, first.hint)
        raise MemcError((placed, *error.diagnostics[1:]), error.exit_code) from error


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
            hint="run memc compile again",
        )
        for outcome in outcomes
        for name, change in outcome.changes.items()
        if change is not Change.IDENTICAL
    ]
