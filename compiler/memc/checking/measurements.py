"""Measurements in a lock that no longer say anything about the plan beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memc.checking.findings import Finding, Level
from memc.comparison.compare import STACK
from memc.driver import LOCK_NAME
from memc.errors import MemcError
from memc.facts import load_gpu
from memc.verify.lock import digest_of_files

_AGAIN = "run memc verify on the machine that is planned for"


def measurement_findings(folder: Path, lock: Mapping[str, Any], planned: Mapping[str, Any]) -> list[Finding]:
    """Returns a warning for each measurement of another plan or other files, with other versions or on another card.

    Args:
        folder: The folder of the lock.
        lock: What is there.
        planned: The lock that memc writes now.
    """
    measurements = lock.get("measurements", [])
    if not isinstance(measurements, list) or not all(isinstance(item, dict) for item in measurements):
        return [_warning(folder, "measurement-malformed", "the measurements in the lock cannot be read")]
    found = []
    same = all(lock[part] == planned[part] for part in ("model", "hardware"))
    same = same and lock["plan"]["settings"] == planned["plan"]["settings"]
    for number, measurement in enumerate(measurements, start=1):
        if not same:
            found.append(_warning(folder, "measurement-of-another-plan", f"measurement {number} is of another plan"))
        reasons = [*_other_versions(measurement, planned["facts"]), *_other_cards(measurement, planned["hardware"])]
        if reasons:
            message = f"measurement {number} was made with {', '.join(reasons)}"
            found.append(_warning(folder, "measurement-of-another-machine", message))
        if measurement.get("files_digest") not in (None, "", digest_of_files(lock["files"])):
            message = f"measurement {number} was made before the files of this plan were written anew"
            found.append(_warning(folder, "measurement-of-other-files", message))
    return found


def _other_versions(measurement: Mapping[str, Any], facts: Mapping[str, str]) -> Iterator[str]:
    versions = measurement.get("versions")
    for name, version in sorted(versions.items()) if isinstance(versions, dict) else ():
        planned = facts.get(f"{STACK}{name}")
        if planned is not None and str(version).partition("+")[0] != planned:
            yield f"{name} {version} where {planned} is planned for"


def _other_cards(measurement: Mapping[str, Any], hardware: Mapping[str, Any]) -> Iterator[str]:
    """Yields the cards that are not the planned one; a run on a CPU measures no card."""
    ranks = measurement.get("ranks")
    names = [rank.get("device_name") for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    for name in sorted({name for name in names if isinstance(name, str) and name}):
        if measurement.get("device") != "cpu" and name != hardware.get("name") and _key(name) != hardware.get("gpu"):
            yield f"a {name} where a {hardware.get('name')} is planned for"


def _key(name: str) -> str | None:
    try:
        return load_gpu(name).key
    except MemcError:
        return None


def _warning(folder: Path, code: str, message: str) -> Finding:
    return Finding(code=code, level=Level.WARNING, path=folder / LOCK_NAME, message=message, hint=_AGAIN)
