"""The report: verdict first, figures that agree with the plan, and the way out of a refusal."""

from __future__ import annotations

import pytest
from memc.plan import Infeasible, Plan
from memc.report import describe, plan_report, plan_verdict, refusal_report
from memc.units import GIB
from planspecs import answer_to, plan_of, refusal_of, spec_text
from rich.console import Console


def shown(answer: Plan | Infeasible, width: int = 120) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(plan_report(answer) if isinstance(answer, Plan) else refusal_report(answer))
    return capture.get()


def test_the_verdict_comes_first_and_holds_the_figures_of_the_plan() -> None:
    plan = plan_of(spec_text())
    lines = plan_verdict(plan)
    assert [line.split(":")[0] for line in lines] == ["FITS", "PEAK", "TIME", "PLAN"]
    assert f"{plan.ledger.gpu.required_bytes / GIB:.2f} GiB of {plan.budget.gpu_bytes / GIB:.2f} GiB" in lines[0]
    assert f"rung {plan.rung}: {', '.join(plan.techniques)}" in lines[0]
    assert f"phase {plan.ledger.gpu.binding_phase}" in lines[1]
    assert f"for {plan.total_steps} steps" in lines[2]
    assert shown(plan, 400).splitlines()[: len(lines)] == lines


def test_a_run_of_unknown_length_has_no_total() -> None:
    plan = plan_of(spec_text().replace(", samples: 1000", ""))
    assert "length of the run unknown" in plan_verdict(plan)[2]
    assert "$" not in plan_verdict(plan)[2]


def test_every_phase_and_every_rung_has_its_line() -> None:
    plan = plan_of(spec_text())
    text = shown(plan, 200)
    for phase, size in plan.ledger.gpu.by_phase().items():
        (line,) = (line for line in text.splitlines() if line.split() and line.split()[0] == phase.value)
        assert line.rstrip().endswith(f"{size / GIB:.2f}")
        assert ("<- peak" in line) == (phase is plan.ledger.gpu.binding_phase)
    for step in plan.trail:
        assert step.reason.split(",")[0] in " ".join(text.split())
    assert "-> 4" in text
    for warning in plan.warnings:
        assert warning in " ".join(text.split())


def test_a_refusal_names_shortfall_causes_and_changes() -> None:
    refusal = refusal_of(spec_text(method="full"))
    text = " ".join(shown(refusal, 200).split())
    assert text.startswith(f"DOES NOT FIT: Qwen/Qwen2.5-7B on 1 x {refusal.gpu.name}")
    assert f"{refusal.shortfall_bytes / GIB:.2f} GiB short" in text
    for cause in refusal.causes:
        assert cause in text
    assert "one of these changes alone makes it fit" in text
    for item in refusal.relaxations:
        assert item.input in text
        assert item.needed in text


def test_a_refusal_without_a_way_out_says_so() -> None:
    text = spec_text(method="full", model="meta-llama/Llama-3.1-405B", more="time: {budget: 1h}")
    refusal = answer_to(text)
    assert isinstance(refusal, Infeasible)
    offered = "one of these changes alone" in shown(refusal)
    assert offered == bool(refusal.relaxations)
    assert offered or "no change of one input alone makes it fit" in shown(refusal)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for answer in (plan_of(spec_text()), refusal_of(spec_text(method="full"))):
        assert max(map(len, shown(answer, width).splitlines())) <= width


def test_a_configuration_is_described_by_what_it_does() -> None:
    line = describe(plan_of(spec_text(method="full", gpu="a100-sxm4-80gb", count="8", host="2000GiB")).config)
    assert line.startswith("full, bf16, micro-batch 2 x 1" if "x 1," in line else "full, bf16, micro-batch")
    offloaded = plan_of(spec_text(method="full", host="512GiB", more="ladder: {require: [offload-optimizer]}")).config
    assert "optimizer on the CPU" in describe(offloaded)


def test_throughput_of_short_samples_is_that_of_a_mean_step() -> None:
    plan = plan_of(spec_text().replace("samples: 1000", "samples: 1000, mean_tokens: 512"))
    clock, share = plan.clock, 512 / plan.config.max_length
    mean = clock.mean_step_seconds
    assert mean is not None and mean < clock.step_seconds
    assert clock.mean_tokens_per_second_per_gpu == pytest.approx(clock.tokens_per_step * share / mean)
    line = plan_verdict(plan)[2]
    assert f"per step of full length, {clock.tokens_per_second_per_gpu:,.0f} tokens/s per GPU; " in line
    assert f"on average, {clock.mean_tokens_per_second_per_gpu:,.0f} tokens/s per GPU; " in line


def test_a_model_that_sees_images_alone_has_no_tokens() -> None:
    plan = plan_of(spec_text(model="google/vit-base-patch16-224", method="full", length="2048"))
    rate = plan.config.global_batch_size / plan.clock.step_seconds
    assert f"{rate:,.0f} samples of 197 image positions a second per GPU; " in plan_verdict(plan)[2]
    assert "tokens" not in plan_verdict(plan)[2]
