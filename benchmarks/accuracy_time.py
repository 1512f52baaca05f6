"""How near the clock comes to published step times.

Each record of a file in the corpus' form becomes a workload with everything pinned; its predicted time is compared with
the printed one. What is printed last is one JSON object: count, coverage, median and p90 of the relative error.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from differences import quantile
from memc.clock.estimate import workload_seconds
from memc.clock.microbatch import micro_batch
from memc.clock.schedule import waits
from memc.errors import MemcError
from timed.reading import UnreadableError, text
from timed.workloads import ImpossibleError, Timed, timed

# Rows that their own notes call unfit for comparison of absolute times.
_UNFIT = re.compile(
    r"implausib|inconsisten|anomal|\bbug\b|stall|thrash|approximate$|not stated per|per-GPU not stated|"
    r"unit total vs|compare relative times only|ratios are the useful|assumed from magnitude",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compared record."""

    id: str
    group: str
    card: str
    case: Timed
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.case.measured_seconds - 1


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file: a list, or the first list in a mapping."""
    found = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    if isinstance(found, dict):
        found = next((value for value in found.values() if isinstance(value, list)), [])
    return [record for record in found or [] if isinstance(record, dict)]


def compare(records: Sequence[dict[str, Any]]) -> tuple[list[Row], Counter[str], int]:
    """Returns compared rows, reasons of those left out with their number, and how many rows could be compared."""
    rows, reasons, eligible = [], Counter[str](), 0
    for record in records:
        if text(record.get("confidence")).casefold() == "low":
            reasons["not eligible: low confidence"] += 1
            continue
        if _UNFIT.search(text(record.get("notes"))):
            reasons["not eligible: its notes call it unfit for comparison"] += 1
            continue
        eligible += 1
        try:
            case = timed(record)
            seconds = workload_seconds(case.model, case.compute, case.layout, case.elements, case.facts)
        except ImpossibleError as error:
            reasons[f"not eligible: {error}"] += 1
            eligible -= 1
            continue
        except UnreadableError as error:
            reasons[str(error)] += 1
            continue
        except MemcError as error:
            reasons[error.diagnostics[0].code] += 1
            continue
        except (ValueError, TypeError, KeyError, ArithmeticError, AttributeError, IndexError) as error:
            reasons[f"cannot be read: {type(error).__name__}"] += 1
            continue
        group = (
            f"{text(record.get('source')).split('[')[0].strip()[:60]} | {case.model.key} | {text(record.get('gpu'))}"
        )
        rows.append(Row(id=text(record.get("id")), group=group, card=case.card, case=case, predicted=seconds))
    return rows, reasons, eligible


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns Spearman's correlation; None when one side does not vary."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=lambda index: values[index])
        found = [0.0] * len(values)
        start = 0
        while start < len(order):
            end = start
            while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
                end += 1
            for index in order[start : end + 1]:
                found[index] = (start + end) / 2
            start = end + 1
        return found

    left, right = ranks(first), ranks(second)
    if len(set(left)) < 2 or len(set(right)) < 2:
        return None
    return statistics.correlation(left, right)


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns rows by source, model and card."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.group].append(row)
    return found


def explained(row: Row) -> str:
    """Returns one line about a row: its error, the parts of its time, and what was assumed."""
    case = row.case
    work = micro_batch(case.model, case.compute, case.facts)
    wait = waits(work, case.layout, case.elements, case.facts)
    passes = case.layout.micro_batches
    parts = {
        "products": passes * (work.forward + work.backward),
        "memory": passes * work.bandwidth,
        "launch": passes * (work.forward_launch + work.backward_launch),
        "collectives": wait.communication,
        "transfers": wait.transfers,
        "host": wait.host,
        "optimizer": wait.optimizer,
    }
    said = ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts.items() if seconds > 0.01 * row.predicted)
    notes = "; ".join(case.notes) or "all conditions stated"
    return (
        f"{row.id:14} {row.error:+7.0%}  {case.measured_seconds:9.4g} s measured, {row.predicted:9.4g} predicted "
        f"({said}) [{notes}]"
    )


def report(rows: Sequence[Row], reasons: Counter[str], eligible: int, total: int, worst: int) -> dict[str, Any]:
    """Prints the comparison and returns its summary."""
    left_out = sum(count for reason, count in reasons.items() if not reason.startswith("not eligible"))
    print(f"{total} records, {eligible} eligible, {len(rows)} compared, {left_out} skipped")
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        print(f"  {count:4}  {reason}")
    errors = [abs(row.error) for row in rows]
    summary = {
        "count": len(rows),
        "coverage": round(len(rows) / eligible, 4) if eligible else 0.0,
        "median": round(statistics.median(errors), 4) if errors else None,
        "p90": round(quantile(errors, 0.9), 4) if errors else None,
    }
    if rows:
        print("\nby group: rows, median signed error, median error, rank correlation of time per token")
        correlations = []
        for name, members in sorted(groups(rows).items(), key=lambda item: -len(item[1])):
            signed = statistics.median(row.error for row in members)
            middle = statistics.median(abs(row.error) for row in members)
            found = (
                rank_correlation(
                    [row.predicted / row.case.tokens for row in members],
                    [row.case.measured_seconds / row.case.tokens for row in members],
                )
                if len(members) >= 4
                else None
            )
            if found is not None:
                correlations.append(found)
            shown = "" if found is None else f"{found:.2f}"
            print(f"  {len(members):4} {signed:+7.0%} {middle:7.0%} {shown:>6}  {name}")
        if correlations:
            summary["rank_correlation"] = round(statistics.median(correlations), 2)
            print(f"rank correlation within groups of four and more: median {summary['rank_correlation']:.2f}")
        print(f"\nworst {worst}:")
        for row in sorted(rows, key=lambda row: -abs(row.error))[:worst]:
            print(" ", explained(row))
    return summary


def document(rows: Sequence[Row], summary: dict[str, Any], eligible: int, reasons: Counter[str]) -> dict[str, Any]:
    """Returns what the documentation shows: the summary, errors by kind, why rows were left out, the worst rows."""
    return {
        **summary,
        "eligible": eligible,
        "kinds": {name: _by(rows, kind) for name, kind in KINDS.items()},
        "left_out": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        "worst": [
            {
                "id": row.id,
                "measured_seconds": float(f"{row.case.measured_seconds:.4g}"),
                "predicted_seconds": float(f"{row.predicted:.4g}"),
                "assumed": list(row.case.notes),
            }
            for row in sorted(rows, key=lambda row: -abs(row.error))[:20]
        ],
    }


def _by(rows: Sequence[Row], kind: Callable[[Row], str]) -> dict[str, dict[str, Any]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[kind(row)].append(row)
    return {
        name: {
            "rows": len(members),
            "signed": round(statistics.median(row.error for row in members), 3),
            "median": round(statistics.median(abs(row.error) for row in members), 3),
            "p90": round(quantile([abs(row.error) for row in members], 0.9), 3),
        }
        for name, members in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    }


def _method(row: Row) -> str:
    compute = row.case.compute
    return "full" if compute.trains else "qlora" if compute.quantized else "lora"


def _spread(row: Row) -> str:
    compute, layout = row.case.compute, row.case.layout
    if compute.tensor_parallel * compute.stages > 1:
        return "tensor or pipeline parallel"
    if layout.data_ranks == 1:
        return "one GPU"
    shared = "sharded" if layout.sharding.value != "none" else "replicated"
    return f"{shared}, {'one node' if layout.nodes == 1 else 'several nodes'}"


KINDS: dict[str, Callable[[Row], str]] = {
    "card": lambda row: row.card,
    "method": _method,
    "spread": _spread,
    "kernels": lambda row: row.case.compute.kernels.value,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares a file and prints the tables; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="records in the corpus' form (YAML)")
    parser.add_argument("--worst", type=int, default=15, help="rows to explain")
    parser.add_argument("--half", choices=("first", "second"), help="only every other id prefix, for development")
    parser.add_argument("--write", type=Path, help="file that the documentation reads")
    chosen = parser.parse_args(arguments)
    records = read(chosen.data)
    if chosen.half:
        records = [record for record in records if _half(records)(text(record.get("id"))) == chosen.half]
    rows, reasons, eligible = compare(records)
    summary = report(rows, reasons, eligible, len(records), chosen.worst)
    if chosen.write:
        text_of_file = yaml.safe_dump(document(rows, summary, eligible, reasons), sort_keys=False, width=100)
        chosen.write.write_text(
            f"# Written by make accuracy-time ARGS='--write ...'.\n{text_of_file}", encoding="utf-8"
        )
    print(json.dumps(summary))
    return 0


def _half(records: Sequence[dict[str, Any]]) -> Callable[[str], str]:
    prefixes = sorted({text(record.get("id")).rpartition("-")[0] for record in records})
    place = {prefix: index for index, prefix in enumerate(prefixes)}
    return lambda name: "first" if place[name.rpartition("-")[0]] % 2 == 0 else "second"


if __name__ == "__main__":
    sys.exit(main())
