"""The plan that a trace confirms: solve, trace, and solve again with more room when the trace needs more than fits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from memc.certify.child import NotTraced, TraceProcess
from memc.certify.request import Request, interval_share, request_digest, trace_request, untraceable
from memc.certify.stack import installed_versions, missing_libraries, planned_versions, stack_is_here, tracer_digest
from memc.certify.steps import step_of
from memc.ledger.traced import TracedStep, compare, with_trace
from memc.plan import Certified, Infeasible, Plan, Relaxation
from memc.units import format_gib

_MOST_TRACES = 4

Solver = Callable[[int], Plan | Infeasible]
"""Solves the spec with so many bytes of the GPU's budget kept free."""
Tracer = Callable[[Request], TracedStep | NotTraced]


@dataclass(frozen=True)
class Settled:
    """An answer, and what tracing had to do with it.

    Attributes:
        result: The plan or the refusal.
        traces: Every trace that decided it, that of the plan first.
        notes: Why the plan is estimated only where a trace was asked for, or traced with other versions than planned.
    """

    result: Plan | Infeasible
    traces: tuple[TracedStep, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Search:
    """What is known so far: traces by digest, the margin that they ask for, and what was passed over.

    `least_bytes` is what the smallest of the plans that were passed over needs as traced.
    """

    known: dict[str, TracedStep]
    margin_bytes: int = 0
    least_bytes: int = 0
    passed_over: list[TracedStep] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def certified_answer(
    solve: Solver, model: str, base_dir: Path, known: Iterable[Any], process: TraceProcess | None, seconds: float
) -> Settled:
    """Returns the answer of a spec as traced.

    Args:
        solve: Solves the spec.
        model: The model as the spec names it.
        base_dir: Folder that a path in `model` starts from.
        known: Documents of traces from earlier; what is none of them is left out.
        process: Makes traces that are not known; with None, only those from earlier count.
        seconds: How long all tracing may take.
    """
    steps: dict[str, TracedStep] = {}
    for document in known:
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            step = step_of(document)
            steps[step.digest] = step
    tracer = None
    if process is not None and (stack_is_here() or not steps):
        tracer = _tracer(process, seconds)
    return settle(solve, lambda plan: trace_request(plan.config, model, base_dir, plan.gpu), steps, tracer)


def _tracer(process: TraceProcess, seconds: float) -> Tracer:
    """Returns what traces as long as there is time; solving in between does not count."""
    left = [seconds]

    def trace(request: Request) -> TracedStep | NotTraced:
        start = monotonic()
        found = process.trace(request, left[0])
        left[0] -= monotonic() - start
        return found if isinstance(found, NotTraced) else step_of(found)

    return trace


def settle(
    solve: Solver,
    request_of: Callable[[Plan], Request],
    known: Mapping[str, TracedStep],
    tracer: Tracer | None,
) -> Settled:
    """Returns the cheapest plan that fits as traced; as estimated, where there is no trace of it.

    When a plan needs more as traced than its budget allows, the closed forms are too low for it. What they lack is kept
    free, and the spec is solved again; that goes on until a traced plan fits or nothing does.

    Args:
        solve: Solves the spec.
        request_of: What to trace of a plan.
        known: Traces from earlier, by the digest of their request.
        tracer: Makes traces that are not known; None makes none.
    """
    search = _Search(dict(known))
    for _ in range(_MOST_TRACES):
        result = solve(search.margin_bytes)
        if isinstance(result, Infeasible):
            return Settled(_refused(result, search))
        plan = _with_full_budget(result, search)
        request = request_of(plan)
        step = _step(request, search, tracer)
        if isinstance(step, TracedStep):
            certified = certified_plan(plan, step)
            if certified.ledger.gpu.required_bytes <= plan.budget.gpu_bytes >= _traced_bytes(certified):
                return Settled(certified, (step, *search.passed_over), _of_other_versions(step))
            _pass_over(search, plan, step)
            continue
        return Settled(plan, tuple(search.passed_over), step)
    result = solve(search.margin_bytes)
    if isinstance(result, Infeasible):
        return Settled(_refused(result, search))
    note = f"estimated only: {_MOST_TRACES} plans before it did not fit as traced, and no more were traced"
    return Settled(_with_full_budget(result, search), tuple(search.passed_over), (note,))


def certified_plan(plan: Plan, step: TracedStep) -> Plan:
    """Returns a plan with its trace; where the closed forms are off, its ledger follows the trace and it says so."""
    share = interval_share()
    comparison = compare(plan.ledger.gpu, step, share)
    warnings = plan.warnings
    if not comparison.agrees:
        peak = comparison.peak
        way = "more" if comparison.difference_bytes > 0 else "less"
        warnings = (
            *warnings,
            f"traced, the step allocates {format_gib(peak.traced_bytes)} in phase {peak.phase}, "
            f"{abs(comparison.difference_share):.1%} {way} than the closed forms say: the ledger follows the trace",
        )
    return replace(
        plan,
        ledger=with_trace(plan.ledger, step, share),
        traced=Certified(step=step, comparison=comparison),
        warnings=warnings,
    )


def _traced_bytes(plan: Plan) -> int:
    assert plan.traced is not None
    return plan.traced.comparison.traced_required_bytes


def _step(request: Request, search: _Search, tracer: Tracer | None) -> TracedStep | tuple[str, ...]:
    """Returns the trace of a request, or notes that say why there is none."""
    kept = search.known.get(request_digest(request))
    if tracer is None:
        return () if kept is None else kept
    if kept is not None and is_current(kept, request):
        return kept
    why_not = untraceable(request) or _missing(request)
    if not why_not:
        found = tracer(request)
        if isinstance(found, TracedStep):
            return found
        why_not = found.diagnostic.message
    return kept if kept is not None else (f"estimated only: {why_not}",)


def _missing(request: Request) -> str:
    missing = missing_libraries(request.config)
    return f"the trace needs {', '.join(missing)}; pip install 'memc[trace,train]'" if missing else ""


def is_current(step: TracedStep, request: Request) -> bool:
    """Returns whether a trace from earlier is of the planned versions, or what this installation would find."""
    if step.tracer != tracer_digest():
        return False
    return step.versions in (planned_versions(step.versions), installed_versions(request.config))


def _of_other_versions(step: TracedStep) -> tuple[str, ...]:
    """Returns a note on the libraries that a trace ran in other versions than the plan's."""
    planned = planned_versions(step.versions)
    others = [
        f"{name} {run}, planned is {planned[name]}" for name, run in step.versions.items() if run != planned[name]
    ]
    return (f"traced with {'; '.join(others)}",) if others else ()


def _pass_over(search: _Search, plan: Plan, step: TracedStep) -> None:
    """Notes that a plan does not fit as traced, and keeps free what the closed forms lack."""
    comparison = compare(plan.ledger.gpu, step, interval_share())
    lacking = comparison.traced_required_bytes - plan.ledger.gpu.required_bytes
    needs = comparison.traced_required_bytes
    search.margin_bytes = max(search.margin_bytes, lacking)
    search.least_bytes = min(search.least_bytes or needs, needs)
    search.passed_over.append(step)
    names = ", ".join(plan.techniques) or "as asked"
    search.reasons.append(
        f"traced, {names} needs {format_gib(comparison.traced_required_bytes)} of "
        f"{format_gib(plan.budget.gpu_bytes)}: {format_gib(lacking)} more than the closed forms say, which is kept free"
    )


def _refused(result: Infeasible, search: _Search) -> Infeasible:
    """Returns a refusal that says what was passed over for its trace, and which target would have room for it."""
    if not search.margin_bytes:
        return result
    budget = replace(result.budget, gpu_bytes=result.budget.gpu_bytes + search.margin_bytes)
    target = Relaxation(
        input="memory.target",
        now=format_gib(budget.gpu_bytes),
        needed=format_gib(search.least_bytes) if search.least_bytes <= budget.capacity_bytes else "",
        reason="what the smallest of the traced plans needs",
    )
    return replace(
        result,
        budget=budget,
        shortfall_bytes=search.least_bytes - budget.gpu_bytes,
        causes=(*search.reasons, *result.causes),
        relaxations=(target, *(item for item in result.relaxations if item.input != target.input)),
    )


def _with_full_budget(plan: Plan, search: _Search) -> Plan:
    """Returns a plan that was solved with a margin, with the budget as the spec has it."""
    if not search.margin_bytes:
        return plan
    budget = replace(plan.budget, gpu_bytes=plan.budget.gpu_bytes + search.margin_bytes)
    return replace(plan, budget=budget, warnings=(*search.reasons, *plan.warnings))
