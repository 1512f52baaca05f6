"""Measurements in a lock: adding one, and joining those of several nodes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memc.verify.findings import not_kept
from memc.verify.lock import Promise, lock_document
from memc.verify.verification import Verification


def keep(promise: Promise, verification: Verification) -> Verification:
    """Adds a verification's measurement to the lock, and returns it with what stands there, or with why nothing does.

    Raises:
        MemcError: Exit 2 when the lock vanished or broke since it was read.
    """
    try:
        kept = append_measurement(promise, verification.measurement())
    except OSError as error:
        return replace(verification, diagnostics=(*verification.diagnostics, not_kept(promise, error)))
    return replace(verification, ranks_in_lock=len(kept["ranks"]))


def append_measurement(promise: Promise, measurement: Mapping[str, Any]) -> dict[str, Any]:
    """Adds `measurement` to the lock's list and returns what stands there now.

    A measurement of some ranks joins one of the other ranks that was made under the same conditions. The file is the
    old one or the new one, never half of one; of two calls at the same time, one waits.

    Raises:
        MemcError: Exit 2 when the lock vanished or broke since it was read.
        OSError: When its folder cannot be written to.
    """
    with _alone(promise.path.parent):
        document = lock_document(promise.path)
        kept = [*document.get("measurements", ())]
        added = dict(measurement)
        if kept and (joined := joined_measurement(kept[-1], added)) is not None:
            kept[-1] = added = joined
        else:
            kept.append(added)
        document["measurements"] = kept
        write_atomically(promise.path, json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    return added


def joined_measurement(first: Any, second: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns two measurements of different ranks of one run as one; None when they are not that."""
    if not isinstance(first, dict) or not isinstance(first.get("ranks"), list):
        return None
    own = ("ranks", "required_bytes", "fits", "judged", "step_seconds", "run_seconds", "conditions")
    alike = {key: value for key, value in first.items() if key not in own}
    if alike != {key: value for key, value in second.items() if key not in own}:
        return None
    there, here = ({rank.get("rank") for rank in part["ranks"]} for part in (first, second))
    if there & here or len(there) == second.get("world_size"):
        return None
    judged = bool(first.get("judged") and second.get("judged"))
    return {
        **second,
        "ranks": sorted([*first["ranks"], *second["ranks"]], key=lambda rank: int(rank["rank"])),
        "judged": judged,
        "fits": bool(first.get("fits") and second.get("fits")) if judged else None,
        **{
            name: max((part[name] for part in (first, second) if part.get(name) is not None), default=None)
            for name in ("required_bytes", "step_seconds", "run_seconds")
        },
    }


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds an advisory lock on a folder meanwhile, where the file system has such locks."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text beside its place and moves it there, with the permissions of what it replaces.

    Raises:
        OSError: When the folder cannot be written to; nothing has changed then.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".memc-lock-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(path.stat().st_mode & 0o777)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
