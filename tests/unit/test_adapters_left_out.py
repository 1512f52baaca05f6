"""LoRA on models with experts: the plan says what carries no adapter, in the names that PEFT is given."""

from __future__ import annotations

import pytest
from planspecs import plan_of, spec_text

QWEN = "Qwen/Qwen1.5-MoE-A2.7B"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
PLACE = {"gpu": "h200-sxm-141gb", "count": "2", "length": "512"}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (MIXTRAL, "45.1B of 46.7B weights, are fused tensors and no linears; they carry no adapter"),
        (
            QWEN,
            "they, and gate_proj, up_proj, down_proj beside them, whose names PEFT takes for theirs, carry no adapter",
        ),
    ],
)
def test_experts_without_adapters_are_named(model: str, said: str) -> None:
    plan = plan_of(spec_text(model=model, method="lora", **PLACE))
    assert plan.config.lora is not None
    (line,) = [warning for warning in plan.warnings if "all-linear adapts" in warning]
    assert said in line
    assert f"adapts {', '.join(plan.config.lora.target_modules)}: " in line


@pytest.mark.parametrize(
    "text",
    [
        spec_text(model="Qwen/Qwen2.5-7B", method="lora", **PLACE),
        spec_text(model=MIXTRAL, method="lora", more="lora: {target_modules: attention}\n", **PLACE),
    ],
    ids=["dense", "attention alone"],
)
def test_nothing_is_said_where_nothing_asked_for_is_left_out(text: str) -> None:
    assert not any("all-linear adapts" in warning for warning in plan_of(text).warnings)
