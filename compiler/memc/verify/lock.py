"""The little of `memc.lock` that verification needs: promises, budget, file digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from memc.document import LOCK_SCHEMA
from memc.errors import Diagnostic, ExitCode, Location, MemcError
from memc.ledger.entries import Moment

LOCK_NAME = "memc.lock"


@dataclass(frozen=True, kw_only=True)
class PromisedEntry:
    """One entry of the lock's ledger.

    Attributes:
        name: Its name; empty when the lock gives none.
        account: The account it is booked under.
        bytes: Its size on one GPU; on the host, of all ranks of one node together.
        moments: When it is alive; all moments for what lies outside the allocator.
        in_allocator: Whether torch's allocator holds it.
    """

    name: str
    account: str
    bytes: int
    moments: frozenset[Moment]
    in_allocator: bool


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a lock promises of one GPU, and what its folder holds.

    Attributes:
        path: The lock file.
        files: Generated file (relative, with forward slashes) → SHA-256 of its content, in hexadecimal.
        settings: `plan.settings`, as written.
        peak_allocated_bytes, peak_reserved_bytes, required_bytes: Of the busiest moment.
        uncertainty_bytes: Half the width of the promised interval around `required_bytes`.
        binding_phase: The ledger's phase of the peak.
        by_phase: Ledger phase → allocated bytes.
        entries: The entries of the GPU.
        host_entries: The entries of the host.
        host_required_bytes: What the ledger books on the host of one node; None when it says nothing.
        budget_bytes: What one GPU may use.
        budget_seconds: Longest allowed run; None without a limit.
        step_seconds: Of one optimizer step; None when the lock has no clock.
        total_seconds: Of the whole run; None when it is unknown.
        total_steps: Optimizer steps of the whole run; None when the amount of data is unknown.
        gpu_name: Name of the planned card; empty when unknown.
        capacity_bytes: What torch sees of the planned card; None when unknown.
        model: What the script names the model.
        model_key: The model's key in the catalogue, or the folder that its config was read from.
        saves: Whether the run writes checkpoints.
    """

    path: Path
    files: dict[str, str]
    settings: dict[str, Any]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    required_bytes: int
    uncertainty_bytes: int
    binding_phase: str
    by_phase: dict[str, int]
    entries: tuple[PromisedEntry, ...]
    budget_bytes: int
    step_seconds: float | None
    host_entries: tuple[PromisedEntry, ...] = ()
    host_required_bytes: int | None = None
    budget_seconds: float | None = None
    total_seconds: float | None = None
    total_steps: int | None = None
    gpu_name: str = ""
    capacity_bytes: int | None = None
    model: str = ""
    model_key: str = ""
    saves: bool = True

    @property
    def outside_allocator_bytes(self) -> int:
        """What the ledger books outside torch's allocator: CUDA context, NCCL."""
        return self.required_bytes - self.peak_reserved_bytes

    @property
    def engine(self) -> str:
        """What runs the processes; empty when the settings do not say."""
        return str(self.settings.get("engine", ""))

    @property
    def nodes(self) -> int:
        """Machines that the plan was made for."""
        nodes = self.settings.get("nodes", 1)
        return nodes if isinstance(nodes, int) else 1

    @property
    def gpus_per_node(self) -> int:
        """Processes on one of them."""
        return (self.world_size or 1) // self.nodes

    @property
    def files_digest(self) -> str:
        """SHA-256 over the digests of all generated files: two folders with the same one hold the same files."""
        return digest_of_files(self.files)

    @property
    def world_size(self) -> int | None:
        """Number of processes the plan was made for; None when the settings do not say."""
        if isinstance(size := self.settings.get("world_size"), int):
            return size
        per_node, nodes = self.settings.get("gpus_per_node"), self.settings.get("nodes", 1)
        return per_node * nodes if isinstance(per_node, int) and isinstance(nodes, int) else None


def digest_of_files(files: Mapping[str, str]) -> str:
    """Returns the SHA-256 over the digests of generated files, by name."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()


def read_lock(folder: Path) -> Promise:
    """Returns what the lock in `folder` promises.

    Raises:
        MemcError: Exit 2 when there is no lock, or it is not one that this version of memc wrote.
    """
    path = folder / LOCK_NAME
    document = lock_document(path)
    try:
        return _promise(path, document)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"lacks {error}" if isinstance(error, KeyError) else f"is malformed: {error}"
        raise _bad_lock("lock-malformed", f"{path} {missing}", path) from error


def require_unedited(folder: Path, promise: Promise) -> None:
    """Passes when every generated file is as memc wrote it.

    Raises:
        MemcError: Exit 4, one diagnostic per file that is missing or was edited.
    """
    findings = []
    for name, digest in sorted(promise.files.items()):
        file = folder / name
        if not file.is_file():
            findings.append(("generated-file-missing", f"{name} is listed in {LOCK_NAME} but is not there", file))
        elif hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            findings.append(("generated-file-edited", f"{name} is not what memc wrote: its SHA-256 differs", file))
    if findings:
        hint = "compile the spec again into this folder, then verify; a change belongs in the spec, not in the output"
        raise MemcError(
            tuple(
                Diagnostic(code=code, message=text, where=Location(file=str(file)), hint=hint)
                for code, text, file in findings
            ),
            ExitCode.STALE,
        )


def lock_document(path: Path) -> dict[str, Any]:
    """Returns a whole lock.

    Raises:
        MemcError: Exit 2 when there is none, or it is not one that this version of memc wrote.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except NotADirectoryError:
        raise _bad_lock(
            "lock-missing", f"{path.parent} is a file, and no folder that holds a {LOCK_NAME}", path
        ) from None
    except FileNotFoundError:
        raise _bad_lock("lock-missing", f"{path.parent} holds no {LOCK_NAME}", path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_lock("lock-unreadable", f"{path} cannot be read: {error}", path) from error
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        where = Location(file=str(path), line=error.lineno, column=error.colno)
        raise _bad_lock("lock-malformed", f"{path} is not JSON: {error.msg}", where) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != LOCK_SCHEMA:
        found = f"says schema {schema!r}" if schema is not None else "names no schema"
        raise _bad_lock("lock-foreign", f"{path} {found}; this memc reads {LOCK_SCHEMA!r}", path)
    return dict(document)


def _bad_lock(code: str, message: str, where: Path | Location) -> MemcError:
    place = where if isinstance(where, Location) else Location(file=str(where))
    hint = "give the folder that `memc compile spec.yaml -o out/` wrote, or compile the spec again"
    return MemcError((Diagnostic(code=code, message=message, where=place, hint=hint),), ExitCode.USAGE)


def _promise(path: Path, document: dict[str, Any]) -> Promise:
    gpu, host = document["ledger"]["gpu"], document["ledger"].get("host", {})
    clock, budget, run = document.get("clock", {}), document["budget"], document.get("run", {})
    hardware = document.get("hardware", {})
    return Promise(
        path=path,
        files={_inside(name): _text(digest, name) for name, digest in document["files"].items()},
        settings=dict(document["plan"]["settings"]),
        peak_allocated_bytes=_size(gpu, "peak_allocated_bytes"),
        peak_reserved_bytes=_size(gpu, "peak_reserved_bytes"),
        required_bytes=_size(gpu, "required_bytes"),
        uncertainty_bytes=_size(gpu, "uncertainty_bytes"),
        binding_phase=_text(gpu["binding_phase"], "ledger.gpu.binding_phase"),
        by_phase={phase: _size(gpu["by_phase"], phase) for phase in gpu["by_phase"]},
        entries=tuple(_entry(entry) for entry in gpu["entries"]),
        budget_bytes=_size(budget, "gpu_bytes"),
        step_seconds=_seconds(clock.get("step_seconds")),
        host_entries=tuple(_entry(entry) for entry in host.get("entries", ())),
        host_required_bytes=_size(host, "required_bytes") if "required_bytes" in host else None,
        budget_seconds=_seconds(budget.get("seconds")),
        total_seconds=_seconds(clock.get("total_seconds")),
        total_steps=document["plan"].get("total_steps"),
        gpu_name=_text(hardware.get("name", ""), "hardware.name"),
        capacity_bytes=_size(hardware, "capacity_bytes") if "capacity_bytes" in hardware else None,
        model=_text(run.get("model", ""), "run.model"),
        model_key=_text(document.get("model", {}).get("key", ""), "model.key"),
        saves=bool(run.get("save_steps", 1)),
    )


def _entry(record: Mapping[str, Any]) -> PromisedEntry:
    moments = frozenset(Moment(moment) for moment in record["moments"])
    return PromisedEntry(
        name=_text(record.get("name", ""), "name"),
        account=_text(record["account"], "account"),
        bytes=_size(record, "bytes"),
        moments=moments if record["in_allocator"] else frozenset(Moment),
        in_allocator=bool(record["in_allocator"]),
    )


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)


def _size(record: Mapping[str, Any], key: str) -> int:
    value = record[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{key} must be a whole number of bytes, found {value!r}")
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{key} must be text, found {value!r}")
    return value


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the generated file {name!r} lies outside the folder")
    return name
