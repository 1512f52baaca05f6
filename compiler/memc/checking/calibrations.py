"""A folder that was planned with figures of a user's own, on a machine that has others, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memc.checking.findings import Finding, Level
from memc.driver import LOCK_NAME
from memc.errors import MemcError
from memc.facts.calibration import USER_FACTS, calibration_of, planned_with, user_calibration
from memc.facts.measured import user_path


@contextmanager
def planned_as_locked(lock: Mapping[str, Any]) -> Iterator[None]:
    """Makes a folder planned with the user's figures that its lock carries, or with none, whatever is here."""
    kept = calibration_of(lock.get("calibration"))
    with planned_with(kept if kept is not None and kept.origin == USER_FACTS else None):
        yield


def calibration_findings(folder: Path, lock: Mapping[str, Any]) -> list[Finding]:
    """Returns what is to be said of the figures in a lock and those that this machine has of its card.

    Figures that are switched off (MEMC_CALIBRATION=off) are not compared.
    """
    path, key = folder / LOCK_NAME, str(lock["hardware"].get("gpu", ""))
    kept = calibration_of(lock.get("calibration"))
    if "calibration" in lock and kept is None:
        message = "the measured figures in the lock cannot be read"
        return [_finding("calibration-malformed", Level.WARNING, path, message, "run memc compile again")]
    if user_path() is None or (kept is not None and kept.origin != USER_FACTS):
        return []
    try:
        here = user_calibration(key)
    except MemcError as error:
        first = error.diagnostics[0]
        return [_finding(first.code, Level.WARNING, path, first.message, first.hint)]
    if kept is None:
        return [] if here is None else [_unused(path, key)]
    if here is None:
        message = f"it was planned with {len(kept.figures)} figures measured on a {key} that this machine lacks"
        hint = "memc calibrate the folders they come from, or memc compile again with the catalogue's figures"
        return [_finding("calibration-missing", Level.WARNING, path, message, hint)]
    differing = sorted(
        name for name in kept.figures.keys() | here.figures.keys() if kept.figures.get(name) != here.figures.get(name)
    )
    if not differing:
        return []
    message = f"it was planned with other figures of {key} than those measured by now: {', '.join(differing)}"
    return [_finding("calibration-changed", Level.WARNING, path, message, "run memc compile again")]


def _unused(path: Path, key: str) -> Finding:
    message = f"it was planned without the figures measured on a {key} that this machine has"
    return _finding("calibration-unused", Level.NOTE, path, message, "run memc compile again to plan with them")


def _finding(code: str, level: Level, path: Path, message: str, hint: str) -> Finding:
    return Finding(code=code, level=level, path=path, message=message, hint=hint)
