"""The one place that knows where the shipped templates and specs lie."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable


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
