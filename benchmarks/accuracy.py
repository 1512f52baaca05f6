"""How near the ledger is to the trace: the catalogue's models in every mode, allocated peak of the step.

Traced figures are kept in a file, from which an interrupted run goes on; the ledger is computed anew each time. Figures
that another version of the trace's source made are traced again, unless `--keep-traces` is given. `--write` puts what
was traced into the table that is checked in, from which docs/accuracy.md is made; `--checked-in` compares with that
table and traces nothing. Models and methods are traced in random order, so that what an interrupted run leaves is a
fair sample. The last line printed is one JSON object; its fractions are of the traced peak.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from agreement.cases import MODES, Mode, Shape, cases, config_of, facts_of, shapes, why_not
from agreement.compare import Comparison, Skipped, compare, summaries, summary
from agreement.traces import ROOT, TABLE, read_table, read_traces, run_traces, table_text
from differences import Summary
from memc.errors import MemcError
from memc.facts import model_rows

RESULTS = ROOT / "build" / "accuracy" / "traces.jsonl"
LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")
SHOWN_MISSES = 12


def arguments() -> argparse.Namespace:
    """Returns the options of this run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=[], help="parts of names, or families")
    parser.add_argument(
        "--modes", nargs="+", default=[], help="parts of mode names, such as qlora or every-2: only those"
    )
    parser.add_argument("--sample", type=int, default=0, help="compare this many cases, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="processes that trace")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of traced figures")
    parser.add_argument("--keep-traces", action="store_true", help="use figures of other versions of the trace too")
    parser.add_argument("--no-trace", action="store_true", help="compare with what is traced already, and no more")
    parser.add_argument("--checked-in", action="store_true", help="compare with the table that is checked in")
    parser.add_argument("--write", action="store_true", help="write what is traced into the table that is checked in")
    parser.add_argument("--all", action="store_true", help="trace families too that the ledger does not describe")
    parser.add_argument("--misses", type=Path, help="write every case that is off by more than 0.5 % to this file")
    return parser.parse_args()


def wanted_cases(options: argparse.Namespace) -> list[tuple[Shape, Mode]]:
    """Returns the cases that the options ask for."""
    among = [
        shape
        for shape in shapes()
        if not options.models
        or any(word in shape.models or word == shape.model_type or word in shape.key for word in options.models)
    ]
    modes = [mode for mode in MODES if not options.modes or all(word in str(mode).split("/") for word in options.modes)]
    found = [(shape, mode) for shape, mode in cases(tuple(among)) if mode in modes]
    if options.sample and options.sample < len(found):
        possible = [case for case in found if priced(case[0], options) and not why_not(*case)]
        return sorted(random.Random(options.seed).sample(possible, min(options.sample, len(possible))), key=_order)
    return found


def shuffled(todo: list[tuple[Shape, Mode]], seed: int) -> list[tuple[Shape, Mode]]:
    """Returns cases in random order, those of one model and method together: they share what the trace remembers."""
    groups = sorted({(shape.key, mode.method) for shape, mode in todo})
    place = {group: at for at, group in enumerate(random.Random(seed).sample(groups, len(groups)))}
    return sorted(todo, key=lambda case: place[case[0].key, case[1].method])


def _order(case: tuple[Shape, Mode]) -> tuple[str, int]:
    return case[0].key, MODES.index(case[1])


def priced(shape: Shape, options: argparse.Namespace) -> bool:
    """Returns whether a model is traced: the ledger describes it, or all are asked for."""
    return bool(options.all) or not facts_of(shape.key).unpriced


def main() -> int:
    """Returns 0; prints comparisons of what could be compared."""
    options = arguments()
    wanted = wanted_cases(options)
    if options.checked_in:
        table = read_table()
        peaks = table.peaks
        print("traced with " + ", ".join(f"{name} {found}" for name, found in table.versions.items()))
        errors: dict[tuple[str, str], str] = {}
    else:
        traced = read_traces(options.results, keep=options.keep_traces)
        todo = [
            (shape, mode)
            for shape, mode in wanted
            if (shape.key, str(mode)) not in traced and not why_not(shape, mode) and priced(shape, options)
        ]
        todo = [] if options.no_trace else shuffled(todo, options.seed)
        for done, case in enumerate(run_traces(todo, options.results, jobs=options.jobs), start=1):
            traced[case.model, case.mode] = case
            if done % 50 == 0:
                print(f"traced {done} of {len(todo)}", file=sys.stderr, flush=True)
        peaks = {key: case.peak_bytes for key, case in traced.items() if not case.error}
        errors = {key: f"trace: {case.error}" for key, case in traced.items() if case.error}
        if options.write:
            TABLE.write_text(table_text(traced.values(), {name: version(name).partition("+")[0] for name in LIBRARIES}))
    comparisons, skipped = compare(wanted, peaks, errors)
    report(comparisons, skipped)
    if options.misses:
        options.misses.write_text("\n".join(["# case · ledger over trace", *_misses(comparisons, 0.005), ""]))
    print(json.dumps(verdict(comparisons, skipped)))
    return 0


def report(comparisons: Sequence[Comparison], skipped: Sequence[Skipped]) -> None:
    """Prints tables for people."""
    for title, found in (
        ("family", summaries(comparisons, lambda item: item.shape.model_type)),
        ("method", summaries(comparisons, lambda item: item.mode.method)),
        ("checkpointing", summaries(comparisons, lambda item: item.mode.checkpointing)),
        ("attention", summaries(comparisons, lambda item: item.mode.attention)),
        ("shape", summaries(comparisons, lambda item: item.mode.shape)),
    ):
        print(f"\n{title:<26} {'count':>6} {'median':>8} {'p90':>8} {'over':>8} {'under':>8}")
        for name, row in found.items():
            print(f"{name:<26} {_row(row)}")
    print("\nfarthest apart")
    for line in _misses(comparisons, 0.0)[:SHOWN_MISSES]:
        print(f"  {line}")
    reasons = Counter((item.shape.model_type, item.reason) for item in skipped)
    print(f"\nnot compared: {len(skipped)} cases")
    for (family, reason), count in sorted(reasons.items()):
        print(f"  {count:>5} x {family}: {reason}")
    exact, wrong = parameter_counts()
    print(f"\nparameter counts: {exact} exact" + "".join(f"\n  {line}" for line in wrong))


def _row(row: Summary) -> str:
    return f"{row.count:>6} {row.median:>8.2%} {row.p90:>8.2%} {row.over:>+8.2%} {row.under:>+8.2%}"


def _misses(comparisons: Sequence[Comparison], above: float) -> list[str]:
    """Returns lines on cases that are off by more than a fraction, the farthest first."""
    farthest = sorted(comparisons, key=lambda item: -abs(item.difference))
    return [
        f"{item.difference:+.2%}  {item.shape.key} ({item.shape.model_type}) {item.mode}  "
        f"trace {item.traced_bytes / 2**20:,.0f} MiB, ledger {item.ledger_bytes / 2**20:,.0f} MiB at {item.moment}"
        for item in farthest
        if abs(item.difference) > above
    ]


def parameter_counts() -> tuple[int, list[str]]:
    """Returns how many models count as transformers builds them, and lines on the others."""
    exact, wrong = 0, []
    for row in model_rows():
        try:
            counted = facts_of(row.key).total_params
        except MemcError:
            wrong.append(f"{row.key}: {config_of(row.key)['model_type']} has no description")
            continue
        if counted == row.params:
            exact += 1
        else:
            wrong.append(f"{row.key}: {counted:,} counted, {row.params:,} built")
    return exact, wrong


def verdict(comparisons: Sequence[Comparison], skipped: Sequence[Skipped]) -> dict[str, float | int | None]:
    """Returns the figures of the last line."""
    models = {key for item in comparisons for key in item.shape.models}
    total = len(comparisons) + len(skipped)
    result: dict[str, float | int | None] = {
        "models": len(models),
        "count": len(comparisons),
        "coverage": round(len(comparisons) / total, 4) if total else None,
    }
    row = summary(comparisons) if comparisons else None
    figures = {"median": row.median, "p90": row.p90, "worst": row.worst} if row else {}
    for name in ("median", "p90", "worst"):
        result[name] = round(figures[name], 5) if row else None
    return {**result, "verdicts_right": None}


if __name__ == "__main__":
    sys.exit(main())
