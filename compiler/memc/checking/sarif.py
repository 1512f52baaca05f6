"""A check's findings as SARIF 2.1.0, which code scanning services read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import memc
from memc.checking.findings import Finding, FolderReport
from memc.rules import load_rules

SARIF_VERSION = "2.1.0"
SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_RULES = {
    "auto-without-trainer": "A value is left to a trainer where there is none.",
    "batch-arithmetic": "A batch size is not micro-batch times accumulation times processes.",
    "call-argument-moved": "A call passes an argument that the installed version does not take.",
    "edited": "A generated file was edited by hand.",
    "fact-changed": "A fact that the plan rests on changed.",
    "files-disagree": "Two files of one run state different values.",
    "foreign": "A file that memc never wrote stands where it writes one.",
    "generated-file-replaced": "A link or folder stands where memc wrote a file.",
    "fsdp-key-of-other-generation": "A key of one FSDP generation stands in a file for the other.",
    "launcher-needs-hostfile": "A multi-node launcher has no list of machines.",
    "launcher-per-task": "Every Slurm task starts a launcher that starts all processes itself.",
    "launcher-without-srun": "Slurm gives several nodes and the launcher starts on one.",
    "ledger-line-moved": "A line of the memory ledger changed its size.",
    "left-over": "A file that memc wrote earlier is not yielded any more.",
    "lint-repeated-key": "A key stands twice in one section.",
    "lint-syntax": "A file is not the JSON or YAML that it should be.",
    "lock-foreign": "The lock is of a schema that this memc does not read.",
    "lock-malformed": "The lock cannot be read as one.",
    "measurement-of-another-machine": "A measurement was made with other versions or on another card than planned.",
    "measurement-of-another-plan": "A measurement does not belong to the plan beside it.",
    "memc-changed": "Another memc wrote the folder.",
    "missing": "A generated file is not there.",
    "no-rendezvous": "Processes of several machines are not told where to meet.",
    "no-such-layer-class": "FSDP is to wrap a layer class that the model does not have.",
    "no-such-module": "An adapter names a module that the model does not have.",
    "nvme-buffer-too-small": "An NVMe buffer is smaller than the largest tensor.",
    "nvme-buffers-pinned": "NVMe buffers pin much of host memory.",
    "peak-moved": "The peak, its phase or its budget changed.",
    "setting-of-another-version": "A setting belongs to another version of its library.",
    "setting-removed": "A setting was removed from its library.",
    "setting-renamed": "A setting has another name now.",
    "setting-unknown": "No version of the library knows a setting.",
    "spec-changed": "A field of the spec changed.",
    "stale": "A generated file is not what its spec yields.",
    "steps-left-to-data": "A number of steps is fixed where the data decide it.",
    "version-changed": "A library version that is planned for changed.",
    "world-size": "Processes started and GPUs given do not add up.",
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
    sentences = {rule.id: f"{rule.sentence}." for rule in load_rules()} if code not in _RULES else {}
    text = _RULES.get(code) or sentences.get(code) or f"memc: {code.replace('-', ' ')}."
    return {"id": code, "shortDescription": {"text": text}}


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    text = f"{finding.message}\n{finding.hint}" if finding.hint else finding.message
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.path)}}
    if finding.line:
        place["region"] = {"startLine": finding.line} | ({"startColumn": finding.column} if finding.column else {})
    related = [
        {
            "id": number,
            "physicalLocation": {
                "artifactLocation": {"uri": _uri(other.path)},
                **({"region": {"startLine": other.line, "startColumn": max(1, other.column)}} if other.line else {}),
            },
        }
        for number, other in enumerate(finding.related, start=1)
    ]
    return {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": finding.level.value,
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
        **({"relatedLocations": related} if related else {}),
    }


def _uri(path: Path) -> str:
    """Returns a relative reference below the current folder, else an absolute ``file:`` URI."""
    full = Path(os.path.normpath(path.absolute()))
    try:
        inside = full.relative_to(Path.cwd())
    except ValueError:
        return full.as_uri()
    return quote(inside.as_posix())
