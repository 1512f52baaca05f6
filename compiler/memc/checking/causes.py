"""Why a folder is stale, as notes: what went into it and changed, and the ledger lines that this moved."""

from __future__ import annotations

from pathlib import Path

from memc.checking.findings import Finding, Level
from memc.comparison import Change, Comparison, ledger_lines
from memc.comparison.prose import change_text, peak_text
from memc.driver import LOCK_NAME
from memc.errors import Location
from memc.spec import LoadedSpec

MAX_NOTES = 30


def cause_findings(folder: Path, loaded: LoadedSpec, found: Comparison) -> list[Finding]:
    """Returns a note for each input that changed since the folder was written, and one for what that moved."""
    lock = folder / LOCK_NAME
    notes = [_spec_note(loaded, change) for change in found.spec]
    if found.memc:
        notes.append(
            _note("memc-changed", lock, f"memc {found.memc.before} wrote this folder, this is {found.memc.after}")
        )
    notes += [_note("version-changed", lock, f"library version {change_text(change)}") for change in found.versions]
    notes += [_note("fact-changed", lock, f"fact {change_text(change)}") for change in found.facts]
    if len(notes) > MAX_NOTES:
        more = len(notes) - MAX_NOTES
        notes = [*notes[:MAX_NOTES], _note("more-changed", lock, f"{more} more inputs changed")]
    if not found.facts_recorded:
        notes.append(_note("facts-not-recorded", lock, "the lock was written by a memc that did not record its facts"))
    elif not found.explained:
        notes.append(_note("memc-changed", lock, "spec and facts are the same: memc's rules or templates changed"))
    return notes + _moved(lock, found)


def _moved(lock: Path, found: Comparison) -> list[Finding]:
    notes = [_note("peak-moved", lock, peak_text(peak)) for peak in found.peaks if peak.moved]
    return notes + [_note("ledger-line-moved", lock, line) for line in ledger_lines(found.lines, most=MAX_NOTES)]


def _spec_note(loaded: LoadedSpec, change: Change) -> Finding:
    place: Location = loaded.locate(change.key)
    return _note("spec-changed", loaded.path, f"spec field {change_text(change)}", place.line)


def _note(code: str, path: Path, message: str, line: int = 0) -> Finding:
    return Finding(code=code, level=Level.NOTE, path=path, message=message, line=line)
