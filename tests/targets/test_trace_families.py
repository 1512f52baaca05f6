"""Every kind of model of the catalogue: copied layers equal layers that run, in each of its stacks."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from trace_cases import config

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.facts.models import model_from_config
from memc.trace import trace_step
from memc.trace.build import build
from memc.trace.loop import record_steps
from memc.trace.peaks import peaks_by_instant
from memc.trace.quantized import is_packed
from memc.trace.records import Recording

MODELS = Path(__file__).parents[2] / "specs" / "models"
EAGER = {"attention": "eager"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "google-bert--bert-base-uncased": ({}, {}),
    "google-t5--t5-small": ({"num_layers": 7, "num_decoder_layers": 8}, {}),
    "facebook--bart-base": ({"encoder_layers": 7, "decoder_layers": 8}, {}),
    "openai--whisper-tiny": ({"encoder_layers": 7, "decoder_layers": 8}, {"length": 32}),
    "google--vit-base-patch16-224": ({}, {}),
    "openai--clip-vit-base-patch32": ({}, {}),
    "microsoft--deberta-v3-base": ({"num_hidden_layers": 8}, EAGER),
    "answerdotai--ModernBERT-base": ({"num_hidden_layers": 11}, {}),
    "bigscience--bloom-560m": ({"n_layer": 7}, EAGER),
    "mistralai--Mixtral-8x7B-v0.1": ({"num_hidden_layers": 7}, {}),
    "deepseek-ai--DeepSeek-V2-Lite": ({"num_hidden_layers": 8}, {}),
    "openai--gpt-oss-20b": (
        {"num_hidden_layers": 9, "layer_types": ["sliding_attention", "full_attention"] * 4 + ["sliding_attention"]},
        EAGER,
    ),
    "llava-hf--llava-1.5-7b-hf": (
        {"text_config": {"num_hidden_layers": 7}, "vision_config": {"num_hidden_layers": 8}},
        {"length": 600},
    ),
    "google--gemma-3-4b-pt": (
        {"text_config": {"num_hidden_layers": 16}, "vision_config": {"num_hidden_layers": 7}},
        {"length": 300},
    ),
}


def _model(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load((MODELS / f"{name}.yaml").read_text(encoding="utf-8"))["config"]
    for key, value in changes.items():
        fields[key] = {**fields[key], **value} if isinstance(value, dict) else value
    return fields


def _events(record: Recording) -> list[tuple[int, int, int]]:
    return [(event.delta, event.stage_index, record.blocks[event.block].size_bytes) for event in record.events]


def _stream(record: Recording) -> list[Any]:
    runs = groupby(_events(record), key=lambda event: event[:2])
    return [(key, sorted(run) if key[0] < 0 else list(run)) for key, run in runs]


PASSING_DIFFERS = ("deepseek-ai--DeepSeek-V2-Lite",)
"""In one layer's backward the copy makes and drops one tensor of routing weights more; all else is the same."""
PASSING_BYTES = 64 * 64 * 4  # of 64 tokens and 64 experts in fp32


@pytest.mark.parametrize("name", CASES)
def test_copied_layers_equal_layers_that_run(name: str) -> None:
    changes, settings = CASES[name]
    model, configuration = _model(name, changes), config(**{"length": 64, "precision": "bf16_pure", **settings})
    copied = record_steps(configuration, model)
    run = record_steps(configuration, model, shallow=False, warm_up=True)
    for short, whole in zip(copied.stacks, run.stacks, strict=True):
        assert short.traced_layers < short.layers == whole.traced_layers
    if name in PASSING_DIFFERS:
        made, more = Counter(_events(run.recording)), Counter(_events(copied.recording))
        assert not made - more
        assert len(more - made) == (more - made).total() == 2
        assert {(delta, size) for delta, _, size in more - made} == {(1, PASSING_BYTES), (-1, PASSING_BYTES)}
    else:
        assert _stream(copied.recording) == _stream(run.recording)
    assert peaks_by_instant(copied.recording) == peaks_by_instant(run.recording)


def test_windows_of_a_vision_tower_keep_their_pattern() -> None:
    """Qwen2.5-VL: every eighth layer sees the whole image, the others windows of it."""
    model = _model("Qwen--Qwen2.5-VL-3B-Instruct", {})
    trace = trace_step(config(length=300, precision="bf16_pure"), model)
    vision, text = trace.stacks
    assert (vision.layers, text.layers) == (32, 36)
    assert vision.traced_layers < 32
    assert vision.window is not None and vision.window.period == 8
    assert trace.assumes == ("one image of 256 tokens per sample, inside max_length",)


def test_gated_delta_rule_and_full_attention_repeat_every_fourth_layer() -> None:
    model = _model("Qwen--Qwen3-Next-80B-A3B-Instruct", {"num_experts": 8, "num_experts_per_tok": 2})
    trace = trace_step(config(length=64, precision="bf16_pure"), model)
    assert (trace.layers, trace.traced_layers) == (48, 8)
    assert trace.stacks[0].window is not None and trace.stacks[0].window.period == 4
    assert any("causal_conv1d and fla" in line for line in trace.not_modelled)


FOUR_BIT: dict[str, dict[str, Any]] = {
    "openai-community--gpt2": {"n_layer": 2},
    "facebook--opt-350m": {"num_hidden_layers": 2},
    "bigcode--starcoder2-3b": {"num_hidden_layers": 2},
    "google-bert--bert-base-uncased": {"num_hidden_layers": 2},
    "google-t5--t5-small": {"num_layers": 2, "num_decoder_layers": 2},
    "Qwen--Qwen2.5-0.5B": {"num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", FOUR_BIT)
def test_facts_and_trace_agree_on_what_becomes_4_bit(name: str) -> None:
    model = _model(name, FOUR_BIT[name])
    facts = model_from_config(model, key="case", file="config.json", source="test", checked="2026-01-01")
    counted = sum(linear.weight_params * count for linear, count in facts.linear_modules() if linear.quantized)
    built, _ = build(config(method="qlora", targets=facts.linear_names()), model, shallow=False)
    packed = [module for module in built.modules() if is_packed(module)]
    assert sum(module.in_features * module.out_features for module in packed) == counted > 0


@pytest.mark.parametrize("name", FOUR_BIT)
def test_adapters_of_4_bit_linears_are_those_that_peft_gives_a_loaded_4_bit_model(name: str) -> None:
    adapters = pytest.importorskip("peft.tuners.lora")
    model = _model(name, FOUR_BIT[name])
    facts = model_from_config(model, key="case", file="config.json", source="test", checked="2026-01-01")
    built, _ = build(config(method="qlora", targets=facts.linear_names()), model, shallow=False)
    wrapped = [module for module in built.modules() if isinstance(module, adapters.LoraLayer)]
    on_packed = [type(module) for module in wrapped if is_packed(module.get_base_layer())]
    assert on_packed
    assert frozenset(on_packed) == {adapters.Linear4bit}
