"""Finding the folders that memc wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from memc.driver import LOCK_NAME
from memc.errors import Diagnostic, Location, MemcError

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


def lock_folders(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """Returns, for each path that is there, the folders at or below it that hold a lock, in a stable order.

    A file stands for the folder it lies in. Hidden folders and those of installed packages are passed over, unless they
    are named; symbolic links to folders are not followed below a path.
    """
    return {path: sorted(_below(path)) for path in paths if os.path.lexists(path)}


def each_once(folders: Iterable[Path]) -> list[Path]:
    """Returns folders without those that are another one under a second name."""
    found: dict[str, Path] = {}
    for folder in folders:
        found.setdefault(os.path.realpath(folder), folder)
    return list(found.values())


def path_problems(paths: Iterable[Path], useful: Iterable[Path]) -> MemcError | None:
    """Returns the error for paths that are not there, or hold neither a folder of memc's nor a file that is linted.

    Args:
        paths: What was named.
        useful: Those of them that hold something.
    """
    known, problems = frozenset(useful), []
    for path in paths:
        if path in known:
            continue
        if os.path.lexists(path):
            hint = "name a folder that memc compile wrote, or DeepSpeed, Accelerate, PEFT or trainer settings"
            message = f"no {LOCK_NAME} lies in or below {path}, and no file that can be linted"
            problems.append(_problem("no-lock", message, path, hint))
        else:
            hint = "name a folder that memc compile wrote, or files to lint"
            problems.append(_problem("path-missing", f"there is no {path}", path, hint))
    return MemcError(tuple(problems)) if problems else None


def _below(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        if os.path.lexists(path.parent / LOCK_NAME):
            yield path.parent
        return
    for folder, inner, files in os.walk(path):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in _SKIPPED]
        if LOCK_NAME in files or LOCK_NAME in inner:
            yield Path(folder)


def _problem(code: str, message: str, path: Path, hint: str) -> Diagnostic:
    return Diagnostic(code=code, message=message, where=Location(file=str(path)), hint=hint)
