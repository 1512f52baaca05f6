"""The checked-in rehearsals: of the specs as they are, read back as written, and near the ledger."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from differences import summary_of  # noqa: E402
from rehearsed.cases import MODES, RANKS, SUBJECTS, cases  # noqa: E402
from rehearsed.compare import Comparison, compare  # noqa: E402
from rehearsed.runs import TABLE, read_table, spec_digest, table_text  # noqa: E402

MEDIAN, WORST, LOWEST = 0.02, 0.06, -0.03
"""The goal of the design: half within 2 %, all within 6 %, none more than 3 % too low."""
KNOWN_LOWER = {
    "google/gemma-2-2b zero-3 2",
    "google/gemma-2-2b fsdp2 64",
    "Qwen/Qwen2.5-32B fsdp2 64",
}
"""Cases that are further below: holes in what the allocator reserves, which docs/accuracy.md names as not modelled."""


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    found, _ = compare(cases(), read_table()[1])
    return found


def test_the_cases_are_eight_models_in_nine_modes() -> None:
    assert (len(SUBJECTS), len(MODES)) == (8, 9)
    assert sum(len(mode.ranks) for mode in MODES) == 3 + 6 * len(RANKS)
    assert len({case.name for case in cases()}) == 8 * (3 + 6 * len(RANKS))


def test_the_table_is_of_the_specs_as_they_are() -> None:
    _, runs = read_table()
    known = {case.name: spec_digest(case) for case in cases()}
    assert {name: run.spec for name, run in runs.items()} == {name: known[name] for name in runs}


def test_the_table_is_written_as_it_was_read() -> None:
    assert table_text(read_table()[1].values()) == TABLE.read_text(encoding="utf-8")


def test_every_mode_was_rehearsed(comparisons: list[Comparison]) -> None:
    assert {item.case.mode.name for item in comparisons} == {mode.name for mode in MODES}


def test_the_rehearsals_are_within_the_goal_but_for_those_that_are_named(comparisons: list[Comparison]) -> None:
    row = summary_of(item.difference for item in comparisons)
    assert row is not None
    assert row.median <= MEDIAN
    assert row.worst <= WORST
    assert {item.case.name for item in comparisons if item.difference < LOWEST} == KNOWN_LOWER


def test_what_a_failed_rehearsal_found_is_not_written() -> None:
    _, runs = read_table()
    one = next(iter(runs.values()))
    assert one.case.split()[0] not in table_text([replace(one, error="stopped")])
