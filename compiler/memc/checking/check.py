"""`check_paths`: every folder below some paths against what its spec yields."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from memc import driver
from memc.checking.calibrations import calibration_findings, planned_as_locked
from memc.checking.causes import cause_findings
from memc.checking.edits import first_changed_line, key_edits, unified_diff
from memc.checking.findings import Finding, FolderReport, Level
from memc.checking.linting import each_report, edited_findings, lint_reports
from memc.checking.measurements import measurement_findings
from memc.checking.search import each_once, lock_folders, path_problems
from memc.comparison import compare_locks, read_lock
from memc.document import lock_digest
from memc.driver import LOCK_NAME, Answer
from memc.errors import ExitCode, MemcError, usage_error
from memc.lint import Given
from memc.plan import Infeasible
from memc.units import format_gib

_AGAIN = "run memc compile again"
_MOVE = "move the change into the spec, or run memc compile --force to overwrite it"
_DELETE = "delete it, then run memc compile again"
_SHOWN_KEYS = 4
_FOLDERS_PER_WORKER = 32
"""Fewer do not pay for starting another process."""
_CHUNK = 8


def check_paths(paths: Iterable[Path], given: Given | None = None) -> list[FolderReport]:
    """Returns a report on every folder that memc wrote, at or below the paths, and one on each path's other files.

    Args:
        paths: Folders and files.
        given: What the lint of files that memc never wrote knows besides them.

    Raises:
        MemcError: When a path is not there, or holds neither a folder of memc's nor a file that the lint knows; when a
            card is given that is not in the catalogue.
    """
    named = list(paths)
    locks = lock_folders(named)
    folders = each_once(folder for below in locks.values() for folder in below)
    linted = lint_reports(list(locks), folders, given or Given())
    problems = path_problems(named, [*(path for path, below in locks.items() if below), *linted])
    if problems is not None:
        raise problems
    return [*_check_folders(folders), *each_report(linted)]


def _check_folders(folders: list[Path]) -> list[FolderReport]:
    workers = min(_cores(), len(folders) // _FOLDERS_PER_WORKER)
    if workers < 2:
        return [check_folder(folder) for folder in folders]
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            return list(pool.map(check_folder, folders, chunksize=_CHUNK))
    except (BrokenProcessPool, OSError):  # no processes to be had here
        return [check_folder(folder) for folder in folders]


def _cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_folder(folder: Path) -> FolderReport:
    """Returns a report on one folder. What is wrong stands in it; nothing is raised for it."""
    spec: Path | None = None
    try:
        lock = read_lock(folder)
    except MemcError as error:
        return FolderReport(folder=folder, spec=None, findings=_refused(error, folder / LOCK_NAME))
    try:
        spec = _spec_of(folder, lock)
        with planned_as_locked(lock):
            answer = driver.answer(spec, folder=folder)
        if isinstance(answer.result, Infeasible):
            return _without_plan(folder, spec, lock, (_does_not_fit(spec, answer.result),))
        files = driver.generate(answer, folder, driver.compile_command(spec, folder))
    except MemcError as error:
        return _without_plan(folder, spec, lock, _refused(error, spec or folder / LOCK_NAME))
    return _compared(folder, lock, answer, files)


def _compared(folder: Path, lock: Mapping[str, Any], answer: Answer, files: Mapping[str, str]) -> FolderReport:
    """Returns the report on a folder whose files can be generated anew."""
    planned = json.loads(files[LOCK_NAME])
    found = compare_locks(lock, planned)
    findings = _file_findings(folder, lock, files)
    if found.explained:
        findings = [_also_stale(finding) for finding in findings]
    findings += [finding for finding in (_lock_finding(folder, lock, files[LOCK_NAME]),) if finding is not None]
    if any(finding.code == "stale" for finding in findings):
        findings += cause_findings(folder, answer.loaded, found)
    findings += measurement_findings(folder, lock, planned)
    findings += calibration_findings(folder, lock)
    if any(finding.code in ("edited", "foreign") for finding in findings):
        findings += edited_findings(folder, answer.loaded)
    return FolderReport(folder=folder, spec=answer.loaded.path, findings=tuple(findings), comparison=found)


def _without_plan(
    folder: Path, spec: Path | None, lock: Mapping[str, Any], problems: tuple[Finding, ...]
) -> FolderReport:
    """Returns the report on a folder whose spec yields nothing: what is wrong with it, and edits by digest alone."""
    return FolderReport(folder=folder, spec=spec, findings=(*problems, *_file_findings(folder, lock, None)))


def _spec_of(folder: Path, lock: Mapping[str, Any]) -> Path:
    """Returns the path of the spec that a lock was compiled from, as short as it can be said.

    Raises:
        MemcError: ``spec-gone`` when it is not there.
    """
    named = lock["spec"].get("path")
    spec = folder / named if isinstance(named, str) and named else None
    if spec is None or not spec.is_file():
        raise usage_error(
            "spec-gone",
            f"{folder} was compiled from {named or 'an unnamed spec'}, which is not there",
            hint="restore the spec, or delete the folder",
        )
    short = Path(os.path.normpath(spec))
    return short if short.is_file() and short.samefile(spec) else spec


def _does_not_fit(spec: Path, refusal: Infeasible) -> Finding:
    short = f": {format_gib(refusal.shortfall_bytes)} short" if refusal.shortfall_bytes else ""
    return Finding(
        code="does-not-fit",
        level=Level.ERROR,
        path=spec,
        message=f"the spec does not fit any more{short}",
        hint="memc explain shows the causes and what would make it fit",
        exit_code=ExitCode.DOES_NOT_FIT,
    )


def _refused(error: MemcError, path: Path) -> tuple[Finding, ...]:
    """Returns the diagnostics of an error as findings."""
    return tuple(
        Finding(
            code=item.code,
            level=Level.ERROR,
            path=Path(item.where.file) if item.where is not None and item.where.file else path,
            message=item.message,
            hint=item.hint,
            line=item.where.line if item.where is not None else 0,
            exit_code=error.exit_code,
        )
        for item in error.diagnostics
    )


def _file_findings(folder: Path, lock: Mapping[str, Any], files: Mapping[str, str] | None) -> list[Finding]:
    """Returns what is wrong with the files of a folder, its lock aside.

    Args:
        folder: It.
        lock: What its lock says.
        files: What memc writes now, by relative path; None when that is not known.
    """
    left_over = lock.get("left_over")
    recorded = {**(left_over if isinstance(left_over, dict) else {}), **lock["files"]}
    found = []
    for name in sorted(recorded.keys() | (files or {}).keys()):
        if name == LOCK_NAME:
            continue
        if Path(name).is_absolute() or ".." in Path(name).parts:
            message = f"the lock lists {name!r}, which lies outside its folder"
            found.append(_error("lock-malformed", folder / LOCK_NAME, message, _AGAIN))
            continue
        finding = _file_finding(folder, name, recorded.get(name), None if files is None else files.get(name), files)
        if finding is not None:
            found.append(finding)
    return found


def _file_finding(
    folder: Path, name: str, recorded: str | None, written: str | None, files: Mapping[str, str] | None
) -> Finding | None:
    """Returns what is wrong with one file; None when nothing is."""
    path = folder / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        what = "a symbolic link" if path.is_symlink() else "a folder" if path.is_dir() else "no regular file"
        return _error("generated-file-replaced", path, f"{name} is {what}, not what memc wrote", _AGAIN)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return _absent(path, name, recorded, written, files)
    except OSError as error:
        message = f"{name} cannot be read: {error.strerror or error}"
        return _error("unreadable", path, message, "make the file readable", exit_code=ExitCode.USAGE)
    if written is not None and content == written.encode():
        return None
    edited = recorded is not None and hashlib.sha256(content).hexdigest() != recorded
    if files is None:
        return _error("edited", path, f"{name} was edited by hand: its SHA-256 differs", _MOVE) if edited else None
    if written is None:
        message = f"{name} was written by memc earlier, and the spec does not yield it now"
        return _error("left-over", path, message, _DELETE)
    return _differing(path, name, content, written, edited=edited, known=recorded is not None)


def _absent(
    path: Path, name: str, recorded: str | None, written: str | None, files: Mapping[str, str] | None
) -> Finding | None:
    if files is not None and written is None:
        return None  # a left-over that somebody deleted
    if recorded is None:
        return _error("stale", path, f"{name} is not there: the spec yields it now", _AGAIN,
                      diff=unified_diff(path, None, written))  # fmt: skip
    return _error("missing", path, f"{name} is listed in {LOCK_NAME} and is not there", _AGAIN)


def _differing(path: Path, name: str, content: bytes, written: str, *, edited: bool, known: bool) -> Finding:
    """Returns the finding on a file that is there and is not what memc writes now."""
    diff, line = unified_diff(path, content, written), first_changed_line(content, written)
    if not known:
        message = f"{name} was not written by memc, and the spec yields a file of that name"
        return _error("foreign", path, message, "move it away, then run memc compile", line=line, diff=diff)
    if not edited:
        return _error("stale", path, f"{name} is not what the spec yields now", _AGAIN, line=line, diff=diff)
    if content.replace(b"\r\n", b"\n") == written.encode():
        hint = "keep LF in the repository, for example with `out/** -text` in .gitattributes"
        return _error("edited", path, f"{name} differs in its line endings alone", hint, line=1)
    edits = key_edits(name, content, written)
    shown = "; ".join(str(edit) for edit in edits[:_SHOWN_KEYS])
    more = f"; and {len(edits) - _SHOWN_KEYS} more keys" if len(edits) > _SHOWN_KEYS else ""
    message = f"{name} was edited by hand" + (f": {shown}{more}" if edits else "")
    return _error("edited", path, message, _MOVE, line=(edits[0].line if edits else 0) or line, diff=diff)


def _also_stale(finding: Finding) -> Finding:
    """Returns the finding on an edited file with a word that its spec or facts changed as well."""
    if finding.code != "edited" or not finding.diff:
        return finding
    return replace(finding, message=f"{finding.message} (its inputs changed too, so not all of this is by hand)")


def _lock_finding(folder: Path, lock: Mapping[str, Any], written: str) -> Finding | None:
    """Returns what is wrong with a lock that can be read; None when it is what memc writes now."""
    path = folder / LOCK_NAME
    content = path.read_bytes()
    if content == written.encode():
        return None
    diff, line = unified_diff(path, content, written), first_changed_line(content, written)
    digest = lock.get("digest")
    if digest is not None and digest != lock_digest(lock):
        return _error("edited", path, f"{LOCK_NAME} was edited by hand: its own digest differs", _MOVE,
                      line=line, diff=diff)  # fmt: skip
    if json.loads(written) == lock:
        return _error("edited", path, f"{LOCK_NAME} holds what memc writes, laid out by another program", _AGAIN)
    return _error("stale", path, f"{LOCK_NAME} is not what the spec yields now", _AGAIN, line=line, diff=diff)


def _error(
    code: str,
    path: Path,
    message: str,
    hint: str,
    *,
    line: int = 0,
    diff: str = "",
    exit_code: ExitCode = ExitCode.STALE,
) -> Finding:
    return Finding(
        code=code, level=Level.ERROR, path=path, message=message, hint=hint, line=line, diff=diff, exit_code=exit_code
    )
