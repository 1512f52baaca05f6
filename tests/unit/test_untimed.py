"""Cards that the catalogue knows too little of to time: memory is planned, time is said to be unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from memc.advise import Costs, Desk, Quantity, solution_lines, solve_for, survey, survey_lines
from memc.clock import clock_facts
from memc.clock.rates import rates_of
from memc.config import Precision
from memc.document import clock_document
from memc.errors import MemcError
from memc.facts import GpuFacts, load_gpu, load_model
from memc.page import report_page
from memc.plan import Infeasible, Plan
from memc.render import render
from memc.report import plan_report
from memc.solver import solve
from memc.spec import LoadedSpec, parse_spec
from rich.console import Console

SPEC = """\
model: Qwen/Qwen2.5-1.5B
data: {train: train.jsonl, max_length: 2048, samples: 5000}
method: full
training: {epochs: 1, global_batch_size: 32}
hardware: {gpu: rtx-4090, count: 1, host_memory: 128GiB}
"""
KNOWN = load_gpu("rtx-4090")


def _loaded(more: str = "") -> LoadedSpec:
    return parse_spec(SPEC + more, "spec.yaml")


def _without(*fields: str) -> GpuFacts:
    """Returns the card as if nothing of these had ever been measured or printed."""
    changes = {
        "memory": {"memory_bytes_per_second": None, "achieved_memory_bytes_per_second": None},
        "peak": {"peak_flops_per_second": {}, "achieved_flops_per_second": {}, "sustained_flops_per_second": {}},
    }
    return replace(KNOWN, **{name: value for field in fields for name, value in changes[field].items()})


def _solved(gpu: GpuFacts, more: str = "") -> Plan | Infeasible:
    loaded = _loaded(more)
    return solve(loaded, load_model(loaded.spec.model, base_dir=Path()), gpu, 5000)


@pytest.fixture(params=[("memory",), ("peak",), ("memory", "peak")], ids="-".join)
def gpu(request: pytest.FixtureRequest) -> Iterator[GpuFacts]:
    """Returns a card that lacks figures."""
    yield _without(*request.param)


def test_a_card_without_rates_is_not_timed_by_the_clock(gpu: GpuFacts) -> None:
    with pytest.raises(MemcError, match="its time cannot be estimated"):
        clock_facts(gpu, Precision.BF16, 1)
    assert rates_of(gpu, Precision.BF16, 1).unknown


def test_a_card_with_rates_has_the_clock_s() -> None:
    assert rates_of(KNOWN, Precision.BF16, 1) == clock_facts(KNOWN, Precision.BF16, 1)


def test_memory_is_planned_and_no_second_is_said(gpu: GpuFacts) -> None:
    plan, timed = _solved(gpu), _solved(KNOWN)
    assert isinstance(plan, Plan)
    assert isinstance(timed, Plan)
    assert plan.rung == timed.rung
    assert plan.ledger.gpu.required_bytes <= plan.budget.gpu_bytes
    assert plan.clock.unknown
    assert (plan.clock.total_seconds, plan.clock.total_usd) == (None, None)
    assert all(step.step_seconds is None for step in plan.trail)
    clock = clock_document(plan.clock)
    assert all(value is None for key, value in clock.items() if key.endswith(("seconds", "usd", "per_gpu")))
    assert clock["unknown"] == list(plan.clock.unknown)


def test_every_text_says_that_the_time_is_unknown_and_why(gpu: GpuFacts) -> None:
    plan = _solved(gpu)
    assert isinstance(plan, Plan)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(plan_report(plan))
    notes = render(plan, spec_name="spec.yaml", command="memc compile spec.yaml")["PLAN.md"]
    for text in (capture.get(), notes, report_page(plan, _loaded().spec)):
        assert "unknown, the catalogue has no" in text
        assert re.search(r"\d (ms|s|min|h) per step", text) is None
    for name in plan.clock.unknown:
        assert name in capture.get()


@pytest.mark.parametrize("more", ["time: {budget: 24h}\n", "time: {budget: $100}\n", "objective: fastest\n"])
def test_what_asks_for_a_time_is_refused_with_the_missing_fact(more: str) -> None:
    with pytest.raises(MemcError) as caught:
        _solved(_without("memory"), more)
    first = caught.value.diagnostics[0]
    assert first.code == "time-unknown"
    assert "memory_gb_per_second" in first.message
    assert first.where is not None
    assert first.where.field == more.partition(":")[0] + (".budget" if more.startswith("time") else "")


def test_money_without_a_price_is_refused_until_somebody_gives_one() -> None:
    free = replace(KNOWN, usd_per_hour=None)
    with pytest.raises(MemcError) as caught:
        _solved(free, "time: {budget: $100}\n")
    first = caught.value.diagnostics[0]
    assert first.code == "price-unknown"
    assert "hardware.usd_per_gpu_hour" in first.hint
    priced = SPEC.replace("host_memory: 128GiB", "host_memory: 128GiB, usd_per_gpu_hour: 0.5")
    loaded = parse_spec(priced + "time: {budget: $100}\n", "spec.yaml")
    plan = solve(loaded, load_model(loaded.spec.model, base_dir=Path()), free, 5000)
    assert isinstance(plan, Plan)
    assert plan.clock.total_usd is not None


def test_inverse_questions_are_answered_without_a_time(gpu: GpuFacts) -> None:
    loaded = _loaded()
    desk = Desk(loaded, load_model(loaded.spec.model, base_dir=Path()), gpu, 5000)
    for quantity in (Quantity.MAX_LENGTH, Quantity.MICRO_BATCH_SIZE):
        solution = solve_for(desk, quantity)
        assert solution.answer is not None
        assert solution.answer.plan is not None
        assert (solution.answer.plan.step_seconds, solution.answer.plan.total_seconds) == (None, None)
        text = "\n".join(solution_lines(solution))
        assert "time unknown" in text
        assert re.search(r"\d (ms|s|min|h)\b", text) is None


def test_the_survey_has_a_row_for_a_card_without_a_time_behind_those_with_one(gpu: GpuFacts) -> None:
    loaded = _loaded()
    found = survey(Desk(loaded, load_model(loaded.spec.model, base_dir=Path()), gpu, 5000), [], Costs())
    own = next(row for row in found.rows if row.card == gpu.key)
    assert own.plan is not None
    assert own.plan.step_seconds is None
    assert own.break_even is None
    priced = [row for row in found.rows if row.plan is not None and row.usd_per_gpu_hour is not None]
    assert priced.index(own) > max(
        at for at, row in enumerate(priced) if row.plan is not None and row.plan.total_usd is not None
    )
    assert all(item.slowdown is None and item.step_seconds is None for item in found.optimise)
    assert any(item.required_bytes for item in found.optimise)
    text = "\n".join(survey_lines(found))
    assert f"OWN: 1 x {gpu.key}: time unknown" in text
    assert not [line for line in text.splitlines() if line.startswith("FASTEST") and gpu.key in line]
