"""A ledger beside a trace, and the plan that a trace confirms or overrules. The traces here are made up; no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memc.certify import (
    NotTraced,
    Request,
    installed_versions,
    request_digest,
    step_of,
    trace_request,
    tracer_digest,
    untraceable,
)
from memc.certify.settle import Settled, certified_plan, is_current, settle
from memc.config import Attention, Engine
from memc.document import ledger_document, record_document
from memc.errors import Diagnostic
from memc.facts import load_fact, load_gpu, load_model
from memc.ledger import Account, Grade, Ledger, Moment, Phase, Resource
from memc.ledger.entries import resource_ledger
from memc.ledger.traced import STEP_PHASES, TracedPhase, TracedReserved, TracedStep, compare, with_trace, without_trace
from memc.plan import Infeasible, Plan
from memc.render.notes import notes
from memc.report import plan_report, plan_verdict
from memc.solver import solve
from memc.spec import parse_spec
from memc.units import GIB, MIB, format_gib
from planmaker import make_config
from rich.console import Console

SPEC = """\
model: Qwen/Qwen2.5-1.5B
data: {train: train.jsonl, max_length: 2048, samples: 1000}
method: lora
training: {global_batch_size: 16}
hardware: {gpu: rtx-4090, count: 1}
memory: {target: 16GiB}
"""
SHARE = 0.01
STEP_MOMENTS = frozenset(moment for moment in Moment if moment.phase in STEP_PHASES)


def solver(text: str = SPEC) -> Callable[[int], Plan | Infeasible]:
    loaded = parse_spec(text, "spec.yaml")
    model, gpu = load_model(loaded.spec.model, base_dir=Path()), load_gpu(loaded.spec.hardware.gpu)
    return lambda margin: solve(loaded, model, gpu, 1000, margin_bytes=margin)


def request_of(plan: Plan) -> Request:
    return trace_request(plan.config, plan.model.key, Path(), plan.gpu)


def trace_of(plan: Plan, *, off_bytes: int = 0, factor: float = 1.0, held_bytes: int = 0) -> TracedStep:
    """Returns a trace that agrees with the plan's closed forms but for what is given."""
    bill = without_trace(plan.ledger.gpu)
    cublas = sum(entry.bytes for entry in bill.entries if "cublas" in entry.name)
    sizes = {phase: int((bill.by_phase()[phase] - cublas) * factor) + off_bytes for phase in STEP_PHASES}
    phases = tuple(
        TracedPhase(phase=phase, allocated_bytes=size, by_account={Account.ACTIVATIONS: size})
        for phase, size in sizes.items()
    )
    request = request_of(plan)
    expected = max(sizes.values()) + cublas + held_bytes
    return TracedStep(
        digest=request_digest(request),
        tracer=tracer_digest(),
        versions=installed_versions(request.config),
        phases=phases,
        reserved=TracedReserved(expected_bytes=expected, low_bytes=expected - MIB, high_bytes=expected + MIB),
        stacks=(),
        assumes=(),
        not_modelled=(),
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = solver()(0)
    assert isinstance(found, Plan)
    return found


def test_a_trace_within_the_interval_confirms_the_closed_forms(plan: Plan) -> None:
    step = trace_of(plan, factor=1.004)
    confirmed = certified_plan(plan, step)
    assert confirmed.ledger.gpu.entries == plan.ledger.gpu.entries
    assert confirmed.ledger.gpu.required_bytes == plan.ledger.gpu.required_bytes
    assert (plan.ledger.gpu.grade, confirmed.ledger.gpu.grade) == (Grade.ESTIMATED, Grade.TRACED)
    assert confirmed.warnings == plan.warnings
    assert confirmed.traced is not None
    assert confirmed.traced.comparison.agrees


@given(factor=st.floats(0.5, 2.0).filter(lambda value: abs(value - 1) > 0.02))
def test_a_ledger_that_is_off_follows_the_trace_to_the_byte(plan: Plan, factor: float) -> None:
    step = trace_of(plan, factor=factor)
    ledger = with_trace(plan.ledger, step, SHARE)
    comparison = compare(plan.ledger.gpu, step, SHARE)
    assert not comparison.agrees
    for item in comparison.phases:
        assert ledger.gpu.by_phase()[item.phase] == item.traced_bytes
    for phase in Phase:
        if phase not in STEP_PHASES:
            assert ledger.gpu.by_phase()[phase] == plan.ledger.gpu.by_phase()[phase]
    assert ledger.gpu.required_bytes == comparison.traced_required_bytes
    assert sum(ledger.gpu.by_account().values()) == ledger.gpu.required_bytes
    assert without_trace(ledger.gpu) == plan.ledger.gpu
    assert compare(ledger.gpu, step, SHARE) == comparison
    assert ledger.host == plan.ledger.host


def test_what_the_allocator_holds_beyond_the_ledger_is_an_entry(plan: Plan) -> None:
    allowed = sum(e.uncertainty_bytes for e in plan.ledger.gpu.entries if e.name.startswith("allocator-"))
    above = plan.ledger.gpu.reserved_above_allocated_bytes
    within = with_trace(plan.ledger, trace_of(plan, held_bytes=above + allowed), SHARE)
    assert within.gpu.required_bytes == plan.ledger.gpu.required_bytes
    step = trace_of(plan, held_bytes=above + allowed + GIB)
    ledger = with_trace(plan.ledger, step, SHARE)
    assert ledger.gpu.peak_allocated_bytes == plan.ledger.gpu.peak_allocated_bytes
    assert ledger.gpu.peak_reserved_bytes == plan.ledger.gpu.peak_allocated_bytes + above + allowed + GIB
    assert ledger.gpu.required_bytes == compare(ledger.gpu, step, SHARE).traced_required_bytes
    assert without_trace(ledger.gpu) == plan.ledger.gpu


def with_entry(plan: Plan, **fields: object) -> Ledger:
    """Returns the plan's ledger with one more GiB somewhere, an entry like that of the allocator's rounding."""
    bill = plan.ledger.gpu
    rounding = next(entry for entry in bill.entries if entry.name == "allocator-rounding")
    entry = replace(rounding, **{"name": "allocator-test", "bytes": GIB, "moments": STEP_MOMENTS, **fields})
    return replace(plan.ledger, gpu=resource_ledger(Resource.GPU, (*bill.entries, entry)))


def test_an_allocator_that_holds_less_in_its_replay_is_followed_too(plan: Plan) -> None:
    bill, step = plan.ledger.gpu, trace_of(plan)
    wide = with_entry(plan)
    assert wide.gpu.peak_reserved_bytes == bill.peak_reserved_bytes + GIB
    ledger = with_trace(wide, step, SHARE)
    assert ledger.gpu.peak_reserved_bytes == bill.peak_allocated_bytes
    assert ledger.gpu.required_bytes == compare(wide.gpu, step, SHARE).traced_required_bytes
    assert compare(ledger.gpu, step, SHARE) == compare(wide.gpu, step, SHARE)


def test_a_replay_of_steps_says_nothing_of_an_evaluation_that_holds_more(plan: Plan) -> None:
    evaluation = frozenset({Moment.EVALUATE})
    more = plan.ledger.gpu.peak_allocated_bytes
    wide = with_entry(plan, name="evaluated", bytes=more, moments=evaluation, in_allocator=True)
    ledger = with_trace(wide, trace_of(plan), SHARE)
    assert ledger.gpu.binding_moment is Moment.EVALUATE
    assert ledger.gpu.peak_reserved_bytes == wide.gpu.peak_reserved_bytes


def test_a_plan_that_is_off_says_so(plan: Plan) -> None:
    (warning,) = set(certified_plan(plan, trace_of(plan, factor=0.9)).warnings) - set(plan.warnings)
    assert "10.0% less than the closed forms say" in warning


def test_a_trace_survives_the_lock(plan: Plan) -> None:
    step = trace_of(plan, off_bytes=123)
    assert step_of(record_document(step)) == step


def test_a_plan_that_fits_as_traced_is_kept(plan: Plan) -> None:
    settled = settle(solver(), request_of, {}, lambda request: trace_of(plan, off_bytes=-MIB))
    assert isinstance(settled.result, Plan)
    assert settled.result.config == plan.config
    assert settled.result.budget == plan.budget
    assert settled.traces == (trace_of(plan, off_bytes=-MIB),)
    assert settled.notes == ()


def overruling(plan: Plan, excess_bytes: int) -> tuple[Settled, list[Request]]:
    """Settles a spec whose first plan is traced at `excess_bytes` above its budget, and every other as estimated."""
    asked: list[Request] = []
    over = plan.budget.gpu_bytes - plan.ledger.gpu.required_bytes + excess_bytes
    plans: dict[str, Plan] = {}
    solved = solver()

    def remembered(margin: int) -> Plan | Infeasible:
        found = solved(margin)
        if isinstance(found, Plan):
            plans[request_digest(request_of(found))] = found
        return found

    def tracer(request: Request) -> TracedStep:
        asked.append(request)
        found = plans[request_digest(request)]
        return trace_of(found, off_bytes=over if found.config == plan.config else 0)

    return settle(remembered, request_of, {}, tracer), asked


def test_a_plan_that_does_not_fit_as_traced_gives_way_to_the_next(plan: Plan) -> None:
    settled, asked = overruling(plan, MIB)
    assert isinstance(settled.result, Plan)
    assert len(asked) == 2
    assert settled.result.config == asked[1].config != plan.config
    assert settled.result.budget == plan.budget
    assert settled.result.ledger.gpu.required_bytes <= plan.budget.gpu_bytes
    assert "more than the closed forms say, which is kept free" in settled.result.warnings[0]
    assert [step.digest for step in settled.traces] == [request_digest(request) for request in reversed(asked)]


def test_the_traces_of_a_lock_lead_to_the_same_plan_without_tracing_again(plan: Plan) -> None:
    settled, _ = overruling(plan, MIB)
    known = {step.digest: step for step in settled.traces}
    assert settle(solver(), request_of, known, None) == settled
    assert settle(solver(), request_of, known, _never) == settled


def _never(request: Request) -> TracedStep:
    raise AssertionError("traced again")


def test_a_trace_of_other_versions_is_made_again_and_stands_where_it_cannot_be(plan: Plan) -> None:
    request = request_of(plan)
    old = replace(trace_of(plan), versions={"torch": "1.0"})
    assert is_current(trace_of(plan), request)
    assert is_current(replace(old, versions={"torch": str(load_fact("stack.torch").value)}), request)
    assert not is_current(old, request)
    assert not is_current(replace(trace_of(plan), tracer="another"), request)
    known = {old.digest: old}
    assert settle(solver(), request_of, known, lambda request: trace_of(plan, off_bytes=512)).traces[0] != old
    late = NotTraced(Diagnostic(code="trace-too-slow", message="the trace was not done after 1 s"))
    kept = settle(solver(), request_of, known, lambda request: late)
    assert kept.traces == (old,)
    assert kept.notes == (f"traced with torch 1.0, planned is {load_fact('stack.torch').value}",)


def test_nothing_is_written_as_fitting_when_no_traced_plan_fits() -> None:
    text = (
        SPEC + "ladder: {forbid: [checkpoint-every-layer]}\npin: {micro_batch_size: 1, activation_checkpointing: 0}\n"
    )
    solved = solver(text)
    first = solved(0)
    assert isinstance(first, Plan)
    plans = [first]

    def remembered(margin: int) -> Plan | Infeasible:
        found = solved(margin)
        if isinstance(found, Plan):
            plans.append(found)
        return found

    def tracer(request: Request) -> TracedStep:
        return trace_of(plans[-1], off_bytes=first.budget.gpu_bytes)

    settled = settle(remembered, request_of, {}, tracer)
    refusal = settled.result
    assert isinstance(refusal, Infeasible)
    assert refusal.causes[0].startswith("traced, ")
    assert refusal.budget == first.budget
    assert refusal.shortfall_bytes > 0
    inputs = [item.input for item in refusal.relaxations]
    assert inputs[0] == "memory.target"
    assert len(set(inputs)) == len(inputs)
    assert settled.traces == ()


def test_a_plan_that_cannot_be_traced_is_estimated_and_says_why(plan: Plan) -> None:
    failed = NotTraced(Diagnostic(code="trace-failed", message="the modelling code stopped"))
    settled = settle(solver(), request_of, {}, lambda request: failed)
    assert isinstance(settled.result, Plan)
    assert settled.result.traced is None
    assert settled.notes == ("estimated only: the modelling code stopped",)
    several = solver(SPEC.replace("count: 1", "count: 2"))
    (note,) = settle(several, request_of, {}, _never).notes
    assert note == "estimated only: the gradient buckets of DistributedDataParallel are not traced"


def test_what_a_trace_cannot_see_is_named() -> None:
    seen = Request(make_config(), {}, (8, 0), 108)
    assert untraceable(seen) == ""
    assert untraceable(replace(seen, compute_capability=None))
    for changes in (
        {"engine": Engine.DDP},
        {"engine": Engine.DEEPSPEED},
        {"engine": Engine.FSDP},
        {"context_parallel": 2},
        {"attention": Attention.FLASH_ATTENTION_2},
    ):
        assert untraceable(replace(seen, config=make_config(**changes))), changes


def test_the_digest_tells_requests_apart(plan: Plan) -> None:
    request = request_of(plan)
    other = replace(request, config=replace(request.config, max_length=request.config.max_length + 1))
    assert request_digest(request) == request_digest(request_of(plan))
    assert request_digest(request) != request_digest(other)
    assert request_digest(request) != request_digest(replace(request, model={**request.model, "vocab_size": 7}))


WITHOUT_TORCH = """
import importlib.metadata as metadata, sys
from memc.cli import main
found = metadata.version

def version(name):
    if name in ("torch", "transformers"):
        raise metadata.PackageNotFoundError(name)
    return found(name)

metadata.version = version
main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["compile", "trace"])
def test_without_the_stack_a_compile_is_estimated_and_a_trace_says_what_to_install(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("16GiB", "20GiB"), encoding="utf-8")
    arguments = [command, "spec.yaml", *(["--certify"] if command == "compile" else [])]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if command == "compile":
        assert done.returncode == 0, done.stderr
        assert "note: estimated only: the trace needs torch, transformers; pip install" in done.stderr
        assert (tmp_path / "out" / "memc.lock").is_file()
    else:
        assert done.returncode == 2
        assert "error[trace-library-missing]" in done.stderr
        assert "pip install 'memc[trace,train]'" in done.stderr


def test_room_is_never_negative() -> None:
    assert isinstance(solver()(100 * GIB), Infeasible)


def test_the_report_and_plan_say_how_the_total_is_known(plan: Plan) -> None:

    traced = certified_plan(plan, trace_of(plan, factor=0.9))
    assert len(plan_verdict(traced)) == len(plan_verdict(plan)) + 1
    line = plan_verdict(traced)[-1]
    assert traced.traced is not None
    peak = traced.traced.comparison.peak
    assert line.startswith(f"TRACED: {format_gib(peak.traced_bytes)} allocated in phase {peak.phase}")
    assert f"say {format_gib(traced.traced.comparison.ledger_peak_bytes)} (+" in line
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(plan_report(traced))
    assert "memory of one GPU, GiB, traced" in capture.get()
    rows = notes(traced)["traced"]
    assert [row[0] for row in rows] == [phase.value for phase in STEP_PHASES]
    assert notes(plan)["traced"] == []
    documents = ledger_document(traced.ledger)["gpu"], ledger_document(plan.ledger)["gpu"]
    assert [document["grade"] for document in documents] == ["traced", "estimated"]
    added = {entry["name"] for entry in documents[0]["entries"]} - {entry["name"] for entry in documents[1]["entries"]}
    assert added == {f"trace-difference-{phase.value}" for phase in STEP_PHASES}
