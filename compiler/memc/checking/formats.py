"""A check's reports as text, JSON, GitHub workflow commands or SARIF."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import memc
from memc.checking.findings import Finding, FolderReport, Level, exit_code_of
from memc.checking.sarif import sarif_document
from memc.driver import LOCK_NAME

CHECK_SCHEMA = "memc/check/1"
_COMMANDS = {Level.ERROR: "error", Level.WARNING: "warning", Level.NOTE: "notice"}


def formatted(reports: Sequence[FolderReport], form: str) -> str:
    """Returns the reports in one of `FORMATS`, without a line break at the end."""
    return FORMATS[form](reports)


def _text(reports: Sequence[FolderReport]) -> str:
    lines = [line for report in reports if report.findings for line in _folder_lines(report)]
    stale = sum(not report.current for report in reports)
    folders = "1 folder" if len(reports) == 1 else f"{len(reports)} folders"
    return "\n".join([*lines, f"{folders} checked, {f'{stale} not current' if stale else 'all current'}"])


def _folder_lines(report: FolderReport) -> Iterator[str]:
    """Yields a folder's findings, then its diffs.

    The lock's diff is shown when nothing else tells what changed in it.
    """
    yield f"{report.folder}: {'current' if report.current else 'not current'}"
    for finding in report.findings:
        yield f"  {finding.level}[{finding.code}]: {finding.message}{_place(finding)}"
    for hint in dict.fromkeys(finding.hint for finding in report.findings if finding.hint):
        yield f"  help: {hint}"
    for finding in report.findings:
        told = finding.path.name == LOCK_NAME and finding.code == "stale"
        if finding.diff and not told:
            yield finding.diff.rstrip("\n")


def _place(finding: Finding) -> str:
    if finding.level is Level.NOTE and not finding.line:
        return ""
    return f" ({finding.path}{f':{finding.line}' if finding.line else ''})"


def _json(reports: Sequence[FolderReport]) -> str:
    return json.dumps(check_document(reports), indent=2, sort_keys=True, ensure_ascii=False)


def check_document(reports: Sequence[FolderReport]) -> dict[str, Any]:
    """Returns the reports as plain values; sizes are integers in bytes, times are seconds."""
    return {
        "schema": CHECK_SCHEMA,
        "memc": memc.__version__,
        "exit_code": int(exit_code_of(reports)),
        "folders": [_folder_document(report) for report in reports],
    }


def _folder_document(report: FolderReport) -> dict[str, Any]:
    findings = [
        {
            "code": finding.code,
            "level": finding.level.value,
            "path": finding.path.as_posix(),
            "line": finding.line,
            "message": finding.message,
            "hint": finding.hint,
            "diff": finding.diff,
        }
        for finding in report.findings
    ]
    changes = None if report.comparison is None else asdict(report.comparison)
    return {
        "folder": report.folder.as_posix(),
        "spec": None if report.spec is None else report.spec.as_posix(),
        "current": report.current,
        "findings": findings,
        "changes": changes,
    }


def _github(reports: Sequence[FolderReport]) -> str:
    """Returns one workflow command per finding; what is put into them cannot end them or begin another."""
    lines = []
    for finding in (finding for report in reports for finding in report.findings):
        place = {"file": finding.path.as_posix()} | ({"line": str(finding.line)} if finding.line else {})
        properties = {**place, "title": f"memc {finding.code}"}
        written = ",".join(f"{key}={_escaped(value, also=':,')}" for key, value in properties.items())
        parts = [finding.message, *([f"help: {finding.hint}"] if finding.hint else []), finding.diff.rstrip("\n")]
        message = _escaped("\n".join(part for part in parts if part))
        lines.append(f"::{_COMMANDS[finding.level]} {written}::{message}")
    stale = sum(not report.current for report in reports)
    return "\n".join([*lines, f"{len(reports)} checked, {stale} not current"])


def _escaped(text: str, *, also: str = "") -> str:
    """Returns `text` for a workflow command: percent signs, line breaks and the characters of `also` as %XX.

    Other characters that cannot be shown become spaces, tabs aside.
    """
    shown = (char if char.isprintable() or char in "\r\n\t" else " " for char in text)
    return "".join(f"%{ord(char):02X}" if char in f"%\r\n{also}" else char for char in shown)


def _sarif(reports: Sequence[FolderReport]) -> str:
    return json.dumps(sarif_document(reports), indent=2, sort_keys=True, ensure_ascii=False)


FORMATS: dict[str, Callable[[Sequence[FolderReport]], str]] = {
    "text": _text,
    "json": _json,
    "github": _github,
    "sarif": _sarif,
}
"""How reports can be printed, by name."""
