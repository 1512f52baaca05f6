"""Every report of tests/cases/reports, check by check: it passes, waits with a reason, or disagrees with one.

The form, its reading and the checks are those of benchmarks/reported, which also reads files that are kept elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CASES = sorted((ROOT / "tests" / "cases" / "reports").glob("*.yaml"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from reported.answers import answered  # noqa: E402
from reported.checks import Finding, evaluate  # noqa: E402
from reported.reading import card, read  # noqa: E402

REPORTS = [report for path in CASES for report in yaml.safe_load(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("report", REPORTS, ids=[report["id"] for report in REPORTS])
def test_report(report: Mapping[str, Any], tmp_path: Path) -> None:
    answers = answered(report, tmp_path)
    waiting = []
    for check in report["expected"]["checks"]:
        outcome = evaluate(check, answers)
        assert outcome.detail
        if outcome.finding is Finding.WAITS:
            waiting.append(f"{check['type']}: {outcome.detail}")
        elif check.get("disagree"):
            assert outcome.finding is Finding.FAILED, "memc agrees by now: take `disagree` out of the case"
        else:
            assert outcome.finding is Finding.PASSED, f"{check['type']}: {outcome.detail}"
    if len(waiting) == len(report["expected"]["checks"]):
        pytest.skip("the report waits for files that memc did not write, for a family, or for a run to be read")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("A100-80GB", "a100-sxm4-80gb"),
        ("H100NVL-94GB", "h100-nvl-94gb"),
        ("RTX3090-24GB", "rtx-3090"),
        ("RTX A6000", "rtx-a6000"),
        ("V100-16GB", "v100-sxm2-16gb"),
        ("T4-16GB", "t4"),
        ("MI300X-192GB", "mi300x"),
    ],
)
def test_a_card_is_read_by_its_words_and_gigabytes(name: str, key: str) -> None:
    found = card(name)
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize(
    "sketch",
    [
        {},
        {"model": {"arch": "llama", "params_b": 6.7}},
        {"model": {"arch": "unheard-of", "params_b": 3}, "hardware": {"gpu": "A100-80GB"}},
        {"model": {"arch": "llama", "params_b": 6.738}, "hardware": {"gpu": "no such card"}, "training": None},
        {
            "model": {"arch": "llama", "params_b": 6.738},
            "hardware": {"gpu": "T4-16GB"},
            "training": {"optimizer": "lion"},
        },
    ],
)
def test_an_incomplete_sketch_is_read_without_failing(sketch: dict[str, Any], tmp_path: Path) -> None:
    reading = read({"id": "x", "spec": sketch}, tmp_path)
    assert reading.asked is not None or reading.waits
