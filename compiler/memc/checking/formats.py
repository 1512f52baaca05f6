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
    return "\n".join([*lines, *_summary(reports)])


def _summary(reports: Sequence[FolderReport]) -> Iterator[str]:
    """Yields a line on the folders that memc wrote, and one on the files that it never wrote."""
    written, foreign = ([r for r in reports if bool(r.linted) is linted] for linted in (False, True))
    if written or not foreign:
        stale = sum(not report.current for report in written)
        folders = "1 folder" if len(written) == 1 else f"{len(written)} folders"
        yield f"{folders} checked, {f'{stale} not current' if stale else 'all current'}"
    if foreign:
        documents = sum(report.linted for report in foreign)
        findings = [finding for report in foreign for finding in report.findings]
        said = _counts(findings)
        yield f"{documents} {'document' if documents == 1 else 'documents'} linted, {said or 'nothing found'}"


def _counts(findings: Sequence[Finding]) -> str:
    """Returns how many errors, warnings and notes there are; empty without any."""
    numbers = ((level, sum(finding.level is level for finding in findings)) for level in Level)
    return ", ".join(f"{number} {level}{'s' if number > 1 else ''}" for level, number in numbers if number)


def _folder_lines(report: FolderReport) -> Iterator[str]:
    """Yields a folder's findings, then its diffs.

    The lock's diff is shown when nothing else tells what changed in it.
    """
    state = _counts(report.findings) if report.linted else "current" if report.current else "not current"
    yield f"{report.folder}: {state}"
    for finding in report.findings:
        yield f"  {finding.level}[{finding.code}]: {finding.message}{_place(finding)}"
        if report.linted and finding.hint:
            yield f"    help: {finding.hint}"
    for hint in dict.fromkeys(finding.hint for finding in report.findings if finding.hint and not report.linted):
        yield f"  help: {hint}"
    for finding in report.findings:
        told = finding.path.name == LOCK_NAME and finding.code == "stale"
        if finding.diff and not told:
            yield finding.diff.rstrip("\n")


def _place(finding: Finding) -> str:
    if finding.level is Level.NOTE and not finding.line:
        return ""
    column = f":{finding.column}" if finding.column else ""
    related = f"; see {', '.join(map(str, finding.related))}" if finding.related else ""
    return f" ({finding.path}{f':{finding.line}{column}' if finding.line else ''}{related})"


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
            "column": finding.column,
            "related": [
                {"path": place.path.as_posix(), "line": place.line, "column": place.column} for place in finding.related
            ],
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
        "linted": report.linted,
        "findings": findings,
        "changes": changes,
    }


def _github(reports: Sequence[FolderReport]) -> str:
    """Returns one workflow command per finding; what is put into them cannot end them or begin another."""
    lines = []
    for finding in (finding for report in reports for finding in report.findings):
        place = {"file": finding.path.as_posix()} | ({"line": str(finding.line)} if finding.line else {})
        place |= {"col": str(finding.column)} if finding.column else {}
        properties = {**place, "title": f"memc {finding.code}"}
        written = ",".join(f"{key}={_escaped(value, also=':,')}" for key, value in properties.items())
        related = [f"see {', '.join(map(str, finding.related))}"] if finding.related else []
        help_lines = [f"help: {finding.hint}"] if finding.hint else []
        parts = [finding.message, *related, *help_lines, finding.diff.rstrip("\n")]
        message = _escaped("\n".join(part for part in parts if part))
        lines.append(f"::{_COMMANDS[finding.level]} {written}::{message}")
    own = [report for report in reports if not report.linted]
    stale = sum(not report.current for report in own)
    linted = sum(report.linted for report in reports)
    ends = [f"{len(own)} checked, {stale} not current"] if own or not linted else []
    return "\n".join([*lines, *ends, *([f"{linted} linted"] if linted else [])])


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
