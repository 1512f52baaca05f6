"""A check's findings as SARIF 2.1.0, which code scanning services read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import memc
from memc.checking.findings import Finding, FolderReport

SARIF_VERSION = "2.1.0"
SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_RULES = {
    "edited": "A generated file was edited by hand.",
    "fact-changed": "A fact that the plan rests on changed.",
    "foreign": "A file that memc never wrote stands where it writes one.",
    "generated-file-replaced": "A link or folder stands where memc wrote a file.",
    "ledger-line-moved": "A line of the memory ledger changed its size.",
    "left-over": "A file that memc wrote earlier is not yielded any more.",
    "lock-foreign": "The lock is of a schema that this memc does not read.",
    "lock-malformed": "The lock cannot be read as one.",
    "measurement-of-another-machine": "A measurement was made with other versions or on another card than planned.",
    "measurement-of-another-plan": "A measurement does not belong to the plan beside it.",
    "memc-changed": "Another memc wrote the folder.",
    "missing": "A generated file is not there.",
    "peak-moved": "The peak, its phase or its budget changed.",
    "spec-changed": "A field of the spec changed.",
    "stale": "A generated file is not what its spec yields.",
    "version-changed": "A library version that is planned for changed.",
}


def sarif_document(reports: Sequence[FolderReport]) -> dict[str, Any]:
    """Returns one run with a result per finding. Paths are relative to the current folder, as code scanning wants."""
    findings = [finding for report in reports for finding in report.findings]
    codes = sorted({finding.code for finding in findings})
    return {
        "$schema": SARIF_SCHEMA,
        "version": SARIF_VERSION,
        "runs": [
            {
                "tool": {"driver": {"name": "memc", "version": memc.__version__, "rules": [_rule(c) for c in codes]}},
                "columnKind": "unicodeCodePoints",
                "results": [_result(finding, codes.index(finding.code)) for finding in findings],
            }
        ],
    }


def _rule(code: str) -> dict[str, Any]:
    return {"id": code, "shortDescription": {"text": _RULES.get(code, f"memc: {code.replace('-', ' ')}.")}}


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    text = f"{finding.message}\n{finding.hint}" if finding.hint else finding.message
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.path)}}
    if finding.line:
        place["region"] = {"startLine": finding.line}
    return {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": finding.level.value,
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
    }


def _uri(path: Path) -> str:
    """Returns a relative reference below the current folder, else an absolute ``file:`` URI."""
    full = Path(os.path.normpath(path.absolute()))
    try:
        inside = full.relative_to(Path.cwd())
    except ValueError:
        return full.as_uri()
    return quote(inside.as_posix())
