"""How near the ledger is to rehearsals: eight models in nine modes on one to 64 GPUs, phase by phase.

Rehearsed figures are kept in a file, from which an interrupted run goes on; the ledger is computed anew each time.
Cases run in random order, each mode in turn, so that what an interrupted run leaves is a fair sample. `--write` puts
what was rehearsed into the table that is checked in; `--checked-in` compares with that table and rehearses nothing,
which needs no torch. The last line printed is one JSON object; its fractions are of the rehearsed reserved peak.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from differences import Summary, summary_of
from rehearsed.cases import Case, cases
from rehearsed.compare import Comparison, Skipped, compare, summaries
from rehearsed.runs import PHASES, ROOT, TABLE, Rehearsed, read_runs, read_table, run_cases, spec_digest, table_text

RESULTS = ROOT / "build" / "rehearsed" / "runs.jsonl"
GIB = 2**30


def arguments() -> argparse.Namespace:
    """Returns the options of this run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=[], help="parts of names")
    parser.add_argument("--modes", nargs="+", default=[], help="names of modes, such as zero-1")
    parser.add_argument("--gpus", nargs="+", type=int, default=[], help="numbers of GPUs")
    parser.add_argument("--limit", type=int, default=0, help="rehearse at most this many cases")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of rehearsed figures")
    parser.add_argument("--retry", action="store_true", help="rehearse again what failed")
    parser.add_argument("--no-rehearsals", action="store_true", help="compare with what is rehearsed, and no more")
    parser.add_argument("--checked-in", action="store_true", help="compare with the table that is checked in")
    parser.add_argument("--write", action="store_true", help="write what is rehearsed into the table")
    parser.add_argument("--all", action="store_true", help="print every comparison, phase by phase")
    return parser.parse_args()


def wanted_cases(options: argparse.Namespace) -> list[Case]:
    """Returns the cases that the options ask for."""
    return [
        case
        for case in cases()
        if (not options.models or any(word in case.subject.key for word in options.models))
        and (not options.modes or case.mode.name in options.modes)
        and (not options.gpus or case.ranks in options.gpus)
    ]


def main() -> int:
    """Returns 0; prints comparisons of what could be compared."""
    options = arguments()
    wanted = wanted_cases(options)
    if options.checked_in:
        versions, runs = read_table()
        print("rehearsed with " + ", ".join(f"{name} {found}" for name, found in versions.items()))
    else:
        runs = read_runs(options.results)
        todo = [case for case in wanted if case.card and _is_open(case, options, runs)]
        todo = mixed(todo, options.seed)
        todo = [] if options.no_rehearsals else todo[: options.limit or None]
        for done, run in enumerate(run_cases(todo, options.results), start=1):
            runs[run.case] = run
            print(f"{done}/{len(todo)} {run.case}: {run.error or f'{run.seconds} s'}", file=sys.stderr, flush=True)
        if options.write:
            TABLE.write_text(table_text(runs.values()), encoding="utf-8")
    comparisons, skipped = compare(wanted, runs)
    report(comparisons, skipped, every=options.all)
    print(json.dumps(verdict(comparisons)))
    return 0


def _is_open(case: Case, options: argparse.Namespace, runs: Mapping[str, Rehearsed]) -> bool:
    run = runs.get(case.name)
    return run is None or run.spec != spec_digest(case) or (options.retry and bool(run.error))


def mixed(todo: Sequence[Case], seed: int) -> list[Case]:
    """Returns cases in random order, one of each mode after the other."""
    draw = random.Random(seed)
    places: Counter[str] = Counter()
    order = []
    for case in draw.sample(todo, len(todo)):
        places[case.mode.name] += 1
        order.append((places[case.mode.name], draw.random(), case))
    return [case for _, _, case in sorted(order, key=lambda item: item[:2])]


def report(comparisons: Sequence[Comparison], skipped: Sequence[Skipped], *, every: bool) -> None:
    """Prints tables for people."""
    for title, found in (
        ("mode", summaries(comparisons, lambda item: item.case.mode.name)),
        ("model", summaries(comparisons, lambda item: item.case.subject.key)),
        ("GPUs", summaries(comparisons, lambda item: str(item.case.ranks))),
    ):
        print(f"\n{title:<32} {'count':>6} {'median':>8} {'p90':>8} {'over':>8} {'under':>8}")
        for name, row in found.items():
            print(f"{name:<32} {_row(row)}")
    print(f"\n{'allocated peak of a phase':<32} {'count':>6} {'median':>8} {'p90':>8} {'over':>8} {'under':>8}")
    for phase in PHASES:
        differences = (item.allocated_difference(phase) for item in comparisons)
        phase_row = summary_of(one for one in differences if one is not None)
        if phase_row is not None:
            print(f"{phase:<32} {_row(phase_row)}")
    print("\nfarthest apart" if not every else "\nevery case")
    farthest = sorted(comparisons, key=lambda item: -abs(item.difference))
    for item in farthest if every else farthest[:12]:
        print(f"  {_line(item)}")
    reasons = Counter(item.reason for item in skipped)
    print(f"\nnot compared: {len(skipped)} cases")
    for reason, count in reasons.most_common():
        print(f"  {count:>5} x {reason}")


def _row(row: Summary) -> str:
    return f"{row.count:>6} {row.median:>8.2%} {row.p90:>8.2%} {row.over:>+8.2%} {row.under:>+8.2%}"


def _line(item: Comparison) -> str:
    phases = "  ".join(
        f"{phase} {difference:+.1%}" for phase in PHASES if (difference := item.allocated_difference(phase)) is not None
    )
    sizes = f"reserved {item.reserved_bytes / GIB:.2f} GiB, ledger {item.ledger_reserved_bytes / GIB:.2f} GiB"
    return f"{item.difference:+7.2%}  {item.case.name}: {sizes}; allocated: {phases}"


def verdict(comparisons: Sequence[Comparison]) -> dict[str, float | int | None]:
    """Returns the figures of the last line."""
    row = summary_of(item.difference for item in comparisons)
    names = ("median", "p90", "worst", "under")
    figures = {name: None if row is None else round(getattr(row, name), 5) for name in names}
    return {"count": len(comparisons), **figures}


if __name__ == "__main__":
    sys.exit(main())
