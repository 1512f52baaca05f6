"""`memc trace`: the plan's step, run by the real modelling code on tensors without data."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import memc
from memc.certify import NotTraced, Request, TraceProcess, interval_share, missing_libraries, step_of, trace_request
from memc.certify.request import offloads, untraceable
from memc.config import Engine, TrainingConfig
from memc.driver import Answer
from memc.errors import ExitCode, MemcError, usage_error
from memc.ledger import Estimator, ledger_facts
from memc.ledger.entries import Account, ResourceLedger
from memc.ledger.traced import Comparison, compare, without_trace
from memc.plan import Plan
from memc.units import GIB, format_gib

SCHEMA = "memc/trace/1"
_COLUMNS = 72
_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*%#"


@click.command("trace")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--modules", type=click.IntRange(0), default=10, show_default=True, help="Modules to list at the peak.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=600, show_default=True, metavar="SECONDS", help="When to give up."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def command(spec: Path, modules: int, timeout: float, as_json: bool) -> None:
    """Trace the plan of SPEC (a spec file or a folder that memc wrote) beside its ledger; no GPU is needed.

    The modelling code of the installed transformers and PEFT takes one optimizer step on tensors without data, and
    every allocation is followed. Needs memc[trace]. Exits 3 when the plan does not fit as traced.
    """
    from memc import driver

    answer = driver.answer(driver.spec_path_of(spec), folder=spec if spec.is_dir() else None)
    config, bill = _traced_side(answer)
    request = trace_request(config, answer.loaded.spec.model, answer.loaded.path.parent, answer.result.gpu)
    step = _trace(request, timeout)
    found = compare(bill, step_of(step), interval_share())
    unseen = untraceable(replace(request, config=_config_of(answer)))
    if as_json:
        click.echo(json.dumps(_document(answer, step, found, unseen), indent=2, sort_keys=True, ensure_ascii=False))
    else:
        for line in (*_verdict(answer, found, config, unseen), *_lines(config, step, found, bill, modules)):
            click.echo(line)
    budget = answer.result.budget.gpu_bytes
    fits = bool(unseen) or (isinstance(answer.result, Plan) and found.traced_required_bytes <= budget)
    sys.exit(ExitCode.OK if fits else ExitCode.DOES_NOT_FIT)


def _traced_side(answer: Answer) -> tuple[TrainingConfig, ResourceLedger]:
    """Returns the configuration to trace, and its closed forms; of a refusal, those of the nearest configuration.

    Checkpoints that would wait in host memory are left on the GPU on both sides.
    """
    result = answer.result
    config = _config_of(answer)
    bill = (result.ledger if isinstance(result, Plan) else result.closest_ledger).gpu
    if config.checkpoint_offload:
        config = replace(config, checkpoint_offload=False)
        bill = Estimator(result.model, ledger_facts(result.gpu)).ledger(config).gpu
    return config, without_trace(bill)


def _config_of(answer: Answer) -> TrainingConfig:
    result = answer.result
    return result.config if isinstance(result, Plan) else result.closest_config


def _trace(request: Request, timeout: float) -> dict[str, Any]:
    """Returns the document of the traced step, with the seconds that its process took, imports included.

    Raises:
        MemcError: When it cannot be traced here, or at all.
    """
    if request.config.context_parallel > 1 or request.compute_capability is None:
        raise usage_error(
            "trace-unsupported", f"this plan has no trace: {untraceable(request)}", hint="memc explain shows its ledger"
        )
    missing = missing_libraries(request.config)
    if missing:
        raise usage_error(
            "trace-library-missing",
            f"the trace of this plan runs {', '.join(missing)}, which cannot be found here",
            hint="pip install 'memc[trace,train]', or " + f"pip install {' '.join(missing)}",
        )
    started = time.perf_counter()
    with TraceProcess() as process:
        found = process.trace(request, timeout)
    if isinstance(found, NotTraced):
        raise MemcError((found.diagnostic,))
    return {**found, "process_seconds": round(time.perf_counter() - started, 3)}


def _document(answer: Answer, step: Mapping[str, Any], found: Comparison, unseen: str) -> dict[str, Any]:
    """Returns what `--json` prints; sizes are bytes on one GPU."""
    return {
        "schema": SCHEMA,
        "memc": memc.__version__,
        "spec": {"name": answer.loaded.name, "digest": answer.loaded.spec.digest()},
        "feasible": isinstance(answer.result, Plan),
        "whole_step": not unseen,
        "not_traced": unseen,
        "budget_bytes": answer.result.budget.gpu_bytes,
        "traced": {key: value for key, value in step.items() if key != "schema"},
        "ledger": {
            "phases": [
                {
                    "phase": item.phase.value,
                    "traced_bytes": item.traced_bytes,
                    "ledger_bytes": item.ledger_bytes,
                    "difference_bytes": item.difference_bytes,
                }
                for item in found.phases
            ],
            "peak_difference_bytes": found.difference_bytes,
            "interval_bytes": found.interval_bytes,
            "agrees": found.agrees,
            "required_bytes": found.traced_required_bytes,
        },
    }


def _lines(
    config: TrainingConfig,
    step: Mapping[str, Any],
    found: Comparison,
    bill: ResourceLedger,
    modules: int,
) -> Iterator[str]:
    """Yields the report for people, below its verdict."""
    yield ""
    if config.engine in (Engine.SINGLE, Engine.DDP):
        yield from _phase_table(step, found)
    else:
        yield from _activation_table(step, bill)
    yield ""
    yield from _account_table(step)
    yield ""
    yield from _module_table(step, modules)
    yield ""
    yield from _timeline(step)
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in step["versions"].items())
    depths = ", ".join(
        f"{item['traced_layers']} of {item['layers']} layers of {item['name']}" for item in step["stacks"]
    )
    yield f"run: {depths}; the others repeat them. {versions}"
    yield f"cost: {_cost(step)}"
    reserved = step["reserved"]
    yield (
        f"reserved by torch's allocator, replayed: {format_gib(reserved['expected_bytes'])} "
        f"({format_gib(reserved['low_bytes'])} to {format_gib(reserved['high_bytes'])}), "
        f"{'expandable' if reserved['expandable_segments'] else 'fixed'} segments; "
        f"the ledger says {format_gib(bill.peak_reserved_bytes)} in all phases"
    )
    for line in step["assumes"]:
        yield f"assumed: {line}"
    for line in step["not_modelled"]:
        yield f"not traced: {line}"


def _cost(step: Mapping[str, Any]) -> str:
    """Returns what the trace itself took: seconds, and the memory of its process where that is counted."""
    resident = step["peak_resident_bytes"]
    memory = f", {format_gib(resident)} of memory" if resident is not None else ""
    busy = f"{step['process_seconds']:.1f} s with imports, of which {step['cpu_seconds']:.1f} s on a processor"
    return f"{step['seconds']:.1f} s; {busy}{memory}"


def _verdict(answer: Answer, found: Comparison, config: TrainingConfig, unseen: str) -> Iterator[str]:
    if not isinstance(answer.result, Plan):
        yield "the spec does not fit; traced is the configuration that comes nearest"
    if unseen:
        yield f"PART OF A STEP: {unseen}"
        if config.engine in (Engine.DEEPSPEED, Engine.FSDP):
            rest = "the rest, offload included," if offloads(config) else "the rest"
            yield f"  traced is one rank's forward and backward with whole weights; {rest} is the ledger's alone"
            return
    if _config_of(answer).checkpoint_offload:
        yield "  traced are checkpoints that stay on the GPU; so is the ledger beside them"
    peak, budget = found.peak, answer.result.budget.gpu_bytes
    yield (
        f"TRACED: {format_gib(peak.traced_bytes)} allocated in phase {peak.phase}; the closed forms say "
        f"{format_gib(found.ledger_peak_bytes)} ({-found.difference_share:+.2%})"
    )
    if not found.agrees:
        yield f"  that is more than the {format_gib(found.interval_bytes)} they are taken to be good for: use the trace"
    if _config_of(answer).checkpoint_offload:
        return
    fits = "FITS" if found.traced_required_bytes <= budget else "DOES NOT FIT"
    yield f"{fits}: {format_gib(found.traced_required_bytes)} of {format_gib(budget)}, CUDA context included"


def _phase_table(step: Mapping[str, Any], found: Comparison) -> Iterator[str]:
    running = {item["phase"]: _any_layer(item["running"]) for item in step["phases"]}
    rows = [
        (
            item.phase.value,
            _gib(item.traced_bytes),
            _gib(item.ledger_bytes),
            f"{item.ledger_bytes / item.traced_bytes - 1:+.2%}",
            running.get(item.phase.value, ""),
        )
        for item in found.phases
    ]
    yield "allocated peak by phase, GiB, cuBLAS workspaces in both"
    yield from _table(("phase", "traced", "ledger", "ledger off by", "while running"), rows, left=(0, 4))


def _activation_table(step: Mapping[str, Any], bill: ResourceLedger) -> Iterator[str]:
    """Yields activations alone, which do not depend on how weights and states are spread."""
    ours: dict[str, int] = {}
    for moment in bill.by_moment:
        held = bill.by_account(moment)[Account.ACTIVATIONS]
        ours[moment.phase.value] = max(ours.get(moment.phase.value, 0), held)
    rows = [
        (
            item["phase"],
            _gib(item["by_account"]["activations"]),
            _gib(ours.get(item["phase"], 0)),
            _any_layer(item["running"]),
        )
        for item in step["phases"]
        if item["phase"] in ("forward", "loss", "backward")
    ]
    yield "activations at the peak of each phase, GiB"
    yield from _table(("phase", "traced", "ledger", "while running"), rows, left=(0, 3))


def _any_layer(module: str) -> str:
    """Returns a module's name without its layer: layers that repeat others were not run."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def _account_table(step: Mapping[str, Any]) -> Iterator[str]:
    names = [account.value for account in Account if any(item["by_account"][account.value] for item in step["phases"])]
    rows = [(item["phase"], *(_gib(item["by_account"][name]) for name in names)) for item in step["phases"]]
    yield "traced peaks by account, GiB"
    yield from _table(("phase", *(name.replace("_", " ") for name in names)), rows, left=(0,))


def _module_table(step: Mapping[str, Any], count: int) -> Iterator[str]:
    peak = next(item for item in step["phases"] if item["phase"] == step["binding_phase"])
    rows = [
        (
            _gib(part["allocated_bytes"]),
            part["share"].replace("_", " "),
            f"{part['blocks']:,}",
            part["module"] or "(loss, optimizer)",
            part["operator"],
        )
        for part in peak["modules"][:count]
    ]
    yield f"who holds it at the peak of {peak['phase']}, GiB; * stands for all layers"
    yield from _table(("held", "as", "blocks", "made by", "mostly with"), rows, left=(1, 3, 4))


def _timeline(step: Mapping[str, Any]) -> Iterator[str]:
    """Yields the course of the step: each column is a slice of equally many allocations and releases."""
    points = step["timeline"]
    width = min(_COLUMNS, len(points))
    slices = [points[index * len(points) // width : (index + 1) * len(points) // width] for index in range(width)]
    highest = max(point["allocated_bytes"] for point in points)
    levels = _LEVELS if "utf" in (sys.stdout.encoding or "").lower() else _ASCII_LEVELS
    tops = [max(part, key=lambda point: point["allocated_bytes"]) for part in slices]
    yield f"allocated over the step, {format_gib(highest)} at most"
    yield "  " + "".join(levels[point["allocated_bytes"] * (len(levels) - 1) // highest] for point in tops)
    yield "  " + "".join(point["phase"][0] for point in tops) + "  (forward, loss, backward, step)"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> Iterator[str]:
    cells = [head, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        shown = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(shown)).rstrip()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.3f}"
