"""Holds ledger and clock to what one card measured: peaks, context, verdicts and step times.

The figures are those of `benchmarks/card_suite.py`, kept in the form of the published collections. `--from` puts the
results of another run of the suite into them first; `--write` writes what the documentation shows. What is printed last
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cards.cases import cases, config_of
from cards.corpus import memory_record, read, results, text, time_record
from cards.judging import GPU, Held, held, left_out, parts, priced
from memc.certify.request import Request, interval_share, untraceable
from memc.facts import load_gpu
from memc.ledger import ledger_facts
from memc.ledger.traced import with_trace
from memc.solver.resolve import automatic_reserve_bytes

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
    records = results(read(MEMORY), read(TIMES))
    found, unlike = held(cases(), records), left_out(records)
    print("allocated reserved  time   (priced over measured, less one)")
    for item in found:
        print(_line(item))
    for item in found:
        if abs(item.errors.get("seconds", 0.0)) > FAR:
            print(_explained(item))
    for name, why in unlike.items():
        print(f"not compared, {why}: {name}")
    traced = trace(found) if options.trace else {}
    if options.write is not None:
        text_ = yaml.safe_dump(document(found, traced, unlike), sort_keys=False, allow_unicode=True, width=120)
        options.write.write_text(
            "# Written by benchmarks/accuracy_card.py --trace --write.\n" + text_, encoding="utf-8"
        )
    print(json.dumps(figures(found) | trace_figures(found, traced) | {"not_compared": len(unlike)}))


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What the trace makes of one case.

    Attributes:
        allocated_bytes: Peak of its allocator.
        reserved_bytes: What that holds on this card, where it gives back what lies in no block before it runs out.
        certified_bytes: Reserved peak of the ledger that `memc compile` certifies with this trace.
        certified_fits: Whether `memc compile` would write such a plan: it keeps a reserve free, and counts on an
            allocator that never has to give anything back.
    """

    allocated_bytes: int
    reserved_bytes: int
    certified_bytes: int
    certified_fits: bool


def trace(found: Sequence[Held]) -> dict[str, Traced]:
    """Returns what the trace makes of each case, by name, and says so as it goes."""
    traced = {}
    for item in (item for item in found if not _why_untraced(item)):
        began = time.monotonic()
        one = traced[item.case.name] = _traced(item)
        off = f"{one.certified_bytes / item.reserved_bytes - 1:+.2%}" if item.reserved_bytes else "out of memory"
        print(f"traced in {time.monotonic() - began:5.1f} s, certified {off}: {item.case.name}", flush=True)
    return traced


def _why_untraced(item: Held) -> str:
    gpu = load_gpu(GPU)
    return untraceable(Request(item.case.config, {}, gpu.compute_capability, gpu.multiprocessors))


def _traced(item: Held) -> Traced:
    from memc.certify.steps import step_of
    from memc.certify.worker import step_document
    from memc.trace import Card, trace_step

    gpu, fields = load_gpu(GPU), config_of(item.case.model)
    assert gpu.capacity_bytes is not None
    assert gpu.compute_capability is not None
    document = step_document(Request(item.case.config, fields, gpu.compute_capability, gpu.multiprocessors))
    held_ = document["reserved"]
    bill = with_trace(priced(item.case.model, item.case.config), step_of(document), interval_share()).gpu
    context = ledger_facts(gpu)
    reserved = held_["expected_bytes"]
    if reserved > (room := gpu.capacity_bytes - context.context_bytes):
        card = Card(compute_capability=gpu.compute_capability, multiprocessors=gpu.multiprocessors or 0)
        reserved = trace_step(item.case.config, fields, card=card, capacity_bytes=room).reserved.expected_bytes
    budget = gpu.capacity_bytes - automatic_reserve_bytes(gpu.capacity_bytes, context)
    return Traced(
        allocated_bytes=held_["allocated_bytes"],
        reserved_bytes=reserved,
        certified_bytes=bill.peak_reserved_bytes,
        certified_fits=bill.required_bytes <= budget,
    )


def trace_figures(found: Sequence[Held], traced: Mapping[str, Traced]) -> dict[str, Any]:
    """Returns the errors of the trace, and verdicts of what is certified with it; nothing when nothing was traced."""
    if not traced:
        return {}
    ran = [(item, traced[item.case.name]) for item in found if item.fits and item.case.name in traced]
    kinds = {
        "traced_allocated": [(one.allocated_bytes, item.allocated_bytes) for item, one in ran],
        "traced_reserved": [(one.reserved_bytes, item.reserved_bytes) for item, one in ran],
        "certified_reserved": [(one.certified_bytes, item.reserved_bytes) for item, one in ran if one.certified_fits],
    }
    errors = {kind: [abs(told / size - 1) for told, size in pairs if size] for kind, pairs in kinds.items()}
    return {
        **{kind: _spread(sizes) for kind, sizes in errors.items()},
        "certified_false_fits": [
            item.case.name
            for item in found
            if not item.fits and item.case.name in traced and traced[item.case.name].certified_fits
        ],
        "certified_refusals": [item.case.name for item, one in ran if not one.certified_fits],
    }


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


def document(found: Sequence[Held], traced: Mapping[str, Traced], unlike: Mapping[str, str]) -> dict[str, Any]:
    """Returns what the documentation shows: the figures, one row a case, and why others are not compared."""
    rows = [
        {
            "case": item.case.name.replace("_", " "),
            "allocated_bytes": item.allocated_bytes,
            "priced_allocated_bytes": item.priced_allocated_bytes,
            "reserved_bytes": item.reserved_bytes,
            "traced_reserved_bytes": _kept(traced, item, "reserved_bytes") if item.fits else None,
            "certified_reserved_bytes": _kept(traced, item, "certified_bytes"),
            "seconds": item.seconds,
            "priced_seconds": round(item.priced_seconds, 4),
        }
        for item in found
    ]
    reasons = {why: [name.replace("_", " ") for name in unlike if unlike[name] == why] for why in unlike.values()}
    return {**figures(found), **trace_figures(found, traced), "rows": rows, "not_compared": reasons}


def _kept(traced: Mapping[str, Traced], item: Held, name: str) -> int | None:
    one = traced.get(item.case.name)
    return None if one is None else int(getattr(one, name))


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
