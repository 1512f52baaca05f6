"""The one place that knows where the shipped templates and specs lie, and what is kept beside them."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import cache_from_source
from pathlib import Path


@cache
def templates_root() -> Traversable:
    """Returns the folder of Jinja templates (`memc.templates` in an installed wheel)."""
    return files("memc.templates")


@cache
def specs_root() -> Traversable:
    """Returns the folder of fact files (`memc.specs` in an installed wheel)."""
    return files("memc.specs")


@cache
def sources_root() -> Traversable:
    """Returns the folder of memc's own modules."""
    return files("memc")


def kept_path(source: Traversable, made_by: str) -> Path | None:
    """Returns where what was made of a shipped file is kept: where Python keeps compiled modules, by the same rules.

    PYTHONPYCACHEPREFIX moves it.

    Args:
        source: The file.
        made_by: Letters and digits that differ where what is made of the same file differs.

    Returns:
        The path; None when the file is no file of its own (a wheel that is run without being unpacked).
    """
    return Path(cache_from_source(source, optimization=made_by)) if isinstance(source, Path) else None


def keep(path: Path | None, content: bytes) -> None:
    """Writes what was made of a shipped file, whole or not at all; a folder that cannot be written is left alone.

    Nothing is written where Python would write no byte code (PYTHONDONTWRITEBYTECODE).
    """
    if path is None or sys.dont_write_bytecode:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
