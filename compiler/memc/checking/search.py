"""Finding the folders that memc wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from memc.driver import LOCK_NAME
from memc.errors import Diagnostic, Location, MemcError

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


def lock_folders(paths: Iterable[Path]) -> list[Path]:
    """Returns every folder that holds a lock, at or below the paths, each once, in a stable order.

    A file stands for the folder it lies in. Hidden folders and those of installed packages are passed over, unless they
    are named; symbolic links to folders are not followed below a path.

    Raises:
        MemcError: ``path-missing``, ``no-lock`` for each path that is not there or holds no lock.
    """
    found: dict[str, Path] = {}
    problems: list[Diagnostic] = []
    for path in paths:
        if not os.path.lexists(path):
            problems.append(
                _problem("path-missing", f"there is no {path}", path, "name a folder that memc compile wrote")
            )
            continue
        below = sorted(_below(path))
        if not below:
            hint = "name a folder that memc compile wrote, or one above it"
            problems.append(_problem("no-lock", f"no {LOCK_NAME} lies in or below {path}", path, hint))
        for folder in below:
            found.setdefault(os.path.realpath(folder), folder)
    if problems:
        raise MemcError(tuple(problems))
    return list(found.values())


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
