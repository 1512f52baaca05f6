"""Holds ledger and clock to what one card measured: peaks, context, verdicts and step times.

The figures are those of `benchmarks/card_suite.py`, kept in the form of the published collections. `--from` puts the
results of another run of the suite into them first; `--write` writes what the documentation shows. What is printed last
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from cards.cases import cases, config_of
from cards.corpus import memory_record, read, results, text, time_record
from cards.judging import Held, held, parts

ROOT = Path(__file__).resolve().parents[1]
MEMORY = ROOT / "benchmarks" / "measured" / "h200-memory.yaml"
TIMES = ROOT / "benchmarks" / "measured" / "h200-time.yaml"
FAR = 0.15


def main() -> None:
    """Prints every case, the figures, and where time is far off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", type=Path, dest="results", help="results of the suite, one JSON object a line")
    parser.add_argument("--trace", action="store_true", help="hold the trace and its allocator to the card too")
    parser.add_argument("--write", type=Path, help="write the tables of the documentation to this file")
    options = parser.parse_args()
    if options.results is not None:
        keep(options.results)
    found = held(cases(), results(read(MEMORY), read(TIMES)))
    print("allocated reserved  time   (priced over measured, less one)")
    for item in found:
        print(_line(item))
    for item in found:
        if abs(item.errors.get("seconds", 0.0)) > FAR:
            print(_explained(item))
    traced = trace(found) if options.trace else {}
    if options.write is not None:
        text_ = yaml.safe_dump(document(found, traced), sort_keys=False, allow_unicode=True, width=120)
        options.write.write_text(
            "# Written by benchmarks/accuracy_card.py --trace --write.\n" + text_, encoding="utf-8"
        )
    print(json.dumps(figures(found) | trace_figures(found, traced)))


def trace(found: Sequence[Held]) -> dict[str, tuple[int, int]]:
    """Returns allocated and reserved peaks that the trace expects of the cases that ran, by name."""
    from memc.trace import trace_step

    peaks = {}
    for item in found:
        if item.fits:
            held_ = trace_step(item.case.config, config_of(item.case.model)).reserved
            peaks[item.case.name] = (held_.allocated_bytes, held_.expected_bytes)
    return peaks


def trace_figures(found: Sequence[Held], traced: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Returns the errors of the trace; nothing when nothing was traced."""
    document: dict[str, Any] = {}
    for place, kind in enumerate(("allocated", "reserved") if traced else ()):
        measured = {item.case.name: (item.allocated_bytes, item.reserved_bytes)[place] for item in found if item.fits}
        document[f"traced_{kind}"] = _spread(
            [abs(traced[name][place] / size - 1) for name, size in measured.items() if size]
        )
    return document


def _spread(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(errors)
    ninth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return {"median": round(statistics.median(sizes), 5), "p90": round(ninth, 5), "worst": round(sizes[-1], 5)}


def keep(path: Path) -> None:
    """Writes the results of a run of the suite into the files that are checked in."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_name = {line["case"]: line for line in lines if line.get("kind") in ("measured", "oom")}
    ran = [(case, by_name[case.name]) for case in cases() if case.name in by_name]
    times = [time_record(*each) for each in ran if each[1]["kind"] == "measured"]
    MEMORY.parent.mkdir(parents=True, exist_ok=True)
    MEMORY.write_text(text([memory_record(*each) for each in ran], "Memory of training steps on one H200."))
    TIMES.write_text(text(times, "Seconds of training steps on one H200."))


def figures(found: Sequence[Held]) -> dict[str, Any]:
    """Returns counts, and median, 90th percentile and worst of the errors' sizes, as fractions."""
    document: dict[str, Any] = {"cases": len(found), "measured": sum(item.fits for item in found)}
    for kind in ("allocated", "reserved", "seconds"):
        document[kind] = _spread([abs(item.errors[kind]) for item in found if kind in item.errors])
    contexts = [item.context_bytes for item in found if item.context_bytes is not None]
    return {
        **document,
        "context_bytes": int(statistics.median(contexts)),
        "out_of_memory": sum(not item.fits for item in found),
        "false_fits": [item.case.name for item in found if item.priced_fits and not item.fits],
        "false_refusals": [item.case.name for item in found if item.fits and not item.priced_fits],
    }


def document(found: Sequence[Held], traced: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Returns what the documentation shows: the figures and one row a case."""
    rows = [
        {
            "case": item.case.name.replace("_", " "),
            "allocated_bytes": item.allocated_bytes,
            "priced_allocated_bytes": item.priced_allocated_bytes,
            "reserved_bytes": item.reserved_bytes,
            "traced_reserved_bytes": traced.get(item.case.name, (None, None))[1],
            "seconds": item.seconds,
            "priced_seconds": round(item.priced_seconds, 4),
        }
        for item in found
    ]
    return {**figures(found), **trace_figures(found, traced), "rows": rows}


def _line(item: Held) -> str:
    if not item.fits:
        said = "a fit" if item.priced_fits else "no fit"
        return f"{'out of memory; the ledger says ' + said:32}  {item.case.name}"
    errors = item.errors
    return (
        f"{errors['allocated']:+9.3%} {errors['reserved']:+8.1%} {errors['seconds']:+7.1%}  "
        f"{item.seconds:8.3f} s  {item.case.name}"
    )


def _explained(item: Held) -> str:
    passes = item.case.config.gradient_accumulation_steps
    priced = {name: round(passes * seconds, 3) for name, seconds in parts(item.case.model, item.case.config).items()}
    measured = f"{item.errors['seconds']:+.0%} {item.seconds:.3f} s {dict(item.phase_seconds)}"
    return f"{measured}, priced {priced}: {item.case.name}"


if __name__ == "__main__":
    main()
