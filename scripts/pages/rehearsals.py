"""The ledger beside rehearsals: the checked-in table, compared again when the site is built."""

from __future__ import annotations

import sys
from pathlib import Path

from pages.text import table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from differences import Summary, summary_of  # noqa: E402
from rehearsed.cases import MODES, cases  # noqa: E402
from rehearsed.compare import Comparison, compare, summaries  # noqa: E402
from rehearsed.runs import PHASES, read_table  # noqa: E402


def rehearsals_section() -> str:
    """Returns tables of the ledger against the checked-in rehearsals: by mode, model, number of GPUs, and phase."""
    versions, runs = read_table()
    found, _ = compare(cases(), runs)
    total = summary_of(item.difference for item in found)
    assert total is not None
    stack = ", ".join(f"{name} {version}" for name, version in versions.items())
    columns = ["cases", "median", "90 % within", "most above", "most below"]
    parts = [
        f"{len(found)} of {sum(1 for case in cases() if case.card)} cases, rehearsed with {stack}: the ledger's "
        f"reserved peak is {total.median:.2%} off in the median, {total.p90:.2%} in nine of ten cases, "
        f"{total.over:.2%} too high and {-total.under:.2%} too low at the farthest.\n"
    ]
    modes = summaries(found, lambda item: item.case.mode.name)
    ranks = summaries(found, lambda item: str(item.case.ranks))
    for name, kinds in (
        ("mode", {mode.name: modes[mode.name] for mode in MODES if mode.name in modes}),
        ("model", summaries(found, lambda item: item.case.subject.key)),
        ("GPUs", {count: ranks[count] for count in sorted(ranks, key=int)}),
        ("allocated in a phase", _phases(found)),
    ):
        parts.append(table([name, *columns], [_row(*item) for item in kinds.items()], columns))
    return "\n".join(parts)


def _phases(found: list[Comparison]) -> dict[str, Summary]:
    """Returns statistics of the allocated peak of each probed phase."""
    rows = {}
    for phase in PHASES:
        row = summary_of(one for item in found if (one := item.allocated_difference(phase)) is not None)
        if row is not None:
            rows[phase.replace("_", " ")] = row
    return rows


def _row(name: str, row: Summary) -> list[str]:
    return [name, f"{row.count:,}", f"{row.median:.2%}", f"{row.p90:.2%}", f"{row.over:+.2%}", f"{row.under:+.2%}"]
