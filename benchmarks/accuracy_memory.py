"""Holds the ledger to published memory measurements.

Every record of the file is read as a pinned configuration and priced in the metric that the record counts: what tensors
hold, what the allocator holds, or what the card shows. A record whose decisive condition is unknown is left out, with
the reason. What is printed last is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml
from memc.units import format_gib
from published.explanations import explanation
from published.judging import Outcome, judge_all
from published.records import read_records
from published.summary import Errors, Summary, by_group, is_eligible, skipped_reasons, summarise

MISS = 0.12


def main() -> None:
    """Prints coverage, errors, misses and verdicts of a file of records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="YAML list of records")
    parser.add_argument("--all", action="store_true", help="list every comparison, not only the misses")
    parser.add_argument("--write", type=Path, help="write the tables of the documentation to this file")
    arguments = parser.parse_args()
    outcomes = judge_all(read_records(arguments.data))
    _print_skipped(outcomes)
    _print_groups(outcomes)
    _print_rows(outcomes, 0.0 if arguments.all else MISS)
    _print_verdicts(outcomes)
    summary = summarise(outcomes)
    print(f"\nmeasured, high confidence, known metric: {summary.eligible}; compared: {summary.errors.count}")
    print(_errors("groups weighing the same", summary.errors))
    print(_errors("records weighing the same", summary.plain))
    print(_errors("lower confidence", summary.others))
    print(f"verdicts of high confidence: {summary.right} of {summary.verdicts} right")
    if arguments.write is not None:
        arguments.write.write_text(results_text(outcomes), encoding="utf-8")
    print(json.dumps(figures(summary)))


def figures(summary: Summary) -> dict[str, float]:
    """Returns the last line's figures; shares are fractions, errors weigh every group the same."""
    return {
        "models": summary.errors.models,
        "count": summary.errors.count,
        "coverage": round(summary.coverage, 4),
        "median": round(summary.errors.median, 4),
        "p90": round(summary.errors.p90, 4),
        "worst": round(summary.errors.worst, 4),
        "verdicts_right": round(summary.right / summary.verdicts, 4) if summary.verdicts else 0.0,
    }


def results_text(outcomes: list[Outcome]) -> str:
    """Returns the tables of the documentation as YAML: figures, groups, reasons, misses, wrong verdicts."""
    summary = summarise(outcomes)
    missed = sorted(misses(outcomes, MISS), key=lambda item: -abs(item.error or 0.0))
    document = {
        **figures(summary),
        "eligible": summary.eligible,
        "plain": {"median": round(summary.plain.median, 4), "p90": round(summary.plain.p90, 4)},
        "verdicts": summary.verdicts,
        "oom_called_fit": list(summary.oom_as_fit),
        "groups": {
            name: {
                "records": errors.count,
                "signed": round(signed, 4),
                "median": round(errors.median, 4),
                "p90": round(errors.p90, 4),
            }
            for name, errors, signed in by_group(outcomes)
        },
        "left_out": {reason: own for reason, own, _ in skipped_reasons(outcomes) if own},
        "misses": [
            {"id": item.record.id, "error": round(item.error or 0.0, 4), "why": explanation(item)} for item in missed
        ],
    }
    return "# Written by make accuracy-memory ARGS='--write ...'.\n" + yaml.safe_dump(
        document, sort_keys=False, allow_unicode=True, width=120
    )


def misses(outcomes: list[Outcome], least: float) -> list[Outcome]:
    """Returns the eligible comparisons that are off by more than `least`."""
    return [item for item in outcomes if item.error is not None and abs(item.error) > least and is_eligible(item)]


def _errors(name: str, errors: Errors) -> str:
    return (
        f"{name}: {errors.count} compared, median {errors.median:.1%}, p90 {errors.p90:.1%}, worst {errors.worst:.1%}"
    )


def _print_skipped(outcomes: list[Outcome]) -> None:
    print("left out (of the eligible, of all):")
    for reason, own, total in skipped_reasons(outcomes):
        print(f"  {own:4} {total:4}  {reason}")


def _print_groups(outcomes: list[Outcome]) -> None:
    print("\ncompared, by group (all confidences; signed median last):")
    for name, errors, signed in by_group(outcomes):
        print(f"  {_errors(name, errors)}, signed {signed:+.1%}")


def _print_rows(outcomes: list[Outcome], least: float) -> None:
    rows = misses(outcomes, least)
    print(f"\neligible comparisons off by more than {least:.0%}:")
    for item in sorted(rows, key=lambda item: -abs(item.error or 0.0)):
        assert item.published_bytes is not None and item.priced_bytes is not None
        published, priced = format_gib(item.published_bytes), format_gib(item.priced_bytes)
        where = f"{item.metric}" + (f", {item.ledger.gpu.binding_moment}" if item.ledger is not None else "")
        why = f": {explanation(item)}" if abs(item.error or 0.0) > MISS else ""
        print(f"  {item.error:+7.1%}  {published:>11} published {priced:>11} priced  {where}  {item.record.id}{why}")


def _print_verdicts(outcomes: list[Outcome]) -> None:
    wrong = [item for item in outcomes if item.right is False]
    print("\nverdicts that disagree (all confidences):")
    for item in wrong:
        assert item.priced_bytes is not None and item.capacity_bytes is not None
        print(
            f"  {item.record.kind}: {format_gib(item.priced_bytes)} priced, card {format_gib(item.capacity_bytes)}"
            f"  {item.record.id}"
        )


if __name__ == "__main__":
    main()
