"""What one card measured: every record is of a case that exists, and ledger, clock and documentation agree with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import card_suite  # noqa: E402
from accuracy_card import MEMORY, TIMES, figures  # noqa: E402
from cards.cases import cases  # noqa: E402
from cards.corpus import PREFIX, read, results  # noqa: E402
from cards.judging import Held, held, left_out  # noqa: E402

MEDIAN, WORST, TIME_MEDIAN = 0.0005, 0.03, 0.15
RESERVED_MEDIAN, RESERVED_WORST = 0.02, 0.05


@pytest.fixture(scope="module")
def found() -> list[Held]:
    return held(cases(), results(read(MEMORY), read(TIMES)))


def test_every_case_has_one_name_and_every_record_a_case() -> None:
    names = [case.name for case in cases()]
    assert len(frozenset(names)) == len(names) >= 40
    records = [record["id"].removeprefix(PREFIX) for record in read(MEMORY)]
    assert frozenset(records) <= frozenset(names)
    assert len(records) >= 56, "what was measured is not given up; cases that were never measured wait for a card"
    ran = [record["id"] for record in read(MEMORY) if record["source_kind"] == "measured"]
    assert [record["id"] for record in read(TIMES)] == ran


def test_the_ledger_meets_the_card(found: list[Held]) -> None:
    spread = figures(found)
    assert spread["allocated"]["median"] <= MEDIAN
    assert spread["allocated"]["worst"] <= WORST
    segments = [item.case.config.expandable_segments for item in found if item.priced_fits and not item.fits]
    assert not any(segments), "a plan as memc writes it is called a fit and ran out of memory"
    retried = [one["id"].removeprefix(PREFIX) for one in read(MEMORY) if one["other_metrics"].get("allocator_retries")]
    assert frozenset(spread["false_refusals"]) <= frozenset(retried), "only what ran by giving back may be refused"


def test_what_is_not_compared_is_a_4_bit_base_under_the_adapter_of_plain_linears() -> None:
    records = results(read(MEMORY), read(TIMES))
    unlike = left_out(records)
    assert list(unlike) == [record["id"].removeprefix(PREFIX) for record in read(MEMORY) if record["method"] == "qlora"]
    shown: Mapping[str, Any] = yaml.safe_load((ROOT / "docs" / "accuracy-h200.yaml").read_text(encoding="utf-8"))
    assert [row["case"] for row in shown["rows"]] == [
        case.name.replace("_", " ") for case in cases() if case.name in records and case.name not in unlike
    ]


def test_the_clock_meets_the_card(found: list[Held]) -> None:
    assert figures(found)["seconds"]["median"] <= TIME_MEDIAN


def test_the_documentation_shows_what_was_measured(found: list[Held]) -> None:
    shown: Mapping[str, Any] = yaml.safe_load((ROOT / "docs" / "accuracy-h200.yaml").read_text(encoding="utf-8"))
    assert [row["allocated_bytes"] for row in shown["rows"]] == [item.allocated_bytes for item in found]
    assert shown["cases"] == len(found)


def test_what_compile_certifies_meets_the_card() -> None:
    """The traces are those of `accuracy_card.py --trace`; each takes seconds, so the test reads what they found."""
    shown: Mapping[str, Any] = yaml.safe_load((ROOT / "docs" / "accuracy-h200.yaml").read_text(encoding="utf-8"))
    for kind in ("traced_reserved", "certified_reserved"):
        assert shown[kind]["median"] <= RESERVED_MEDIAN, kind
        assert shown[kind]["worst"] <= RESERVED_WORST, kind
    assert not shown["certified_false_fits"]


def test_a_case_that_fails_ends_no_other_and_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "results.jsonl"
    wanted = list(cases())[:2]

    def start(case: object, extra: list[str]) -> subprocess.Popen[str]:
        fine = json.dumps({"case": wanted[1].name, "kind": "measured", "median_step_seconds": 1.0})
        program = f"print({fine!r})" if case is wanted[1] else "raise SystemExit('no card')"
        return subprocess.Popen(
            [sys.executable, "-c", f"input(); {program}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    monkeypatch.setattr(card_suite, "_start", start)
    assert card_suite.run(wanted, kept, 60.0, []) == 1
    first, second = (json.loads(line) for line in kept.read_text().splitlines())
    assert (first["kind"], second["kind"]) == ("failed", "measured")
    assert "no card" in first["error"]
    assert card_suite.finished(kept) == frozenset({wanted[1].name})
