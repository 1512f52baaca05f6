"""The ledger of models that see images against the trace of their real modelling code, at small sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trace_cases import config

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.facts.adapters import default_lora_targets
from memc.facts.documents import read_spec
from memc.facts.gpus import load_gpu
from memc.facts.models import model_from_config
from memc.ledger.constants import ledger_facts
from memc.ledger.estimate import Estimator
from memc.trace import trace_step

WORST, BELOW = 0.03, -0.01
TEXT: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "image_token_id": 100, "video_token_id": 101}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen/Qwen2-VL-2B-Instruct",
        {**TEXT, **IDS, "vision_config": {"depth": 4, "hidden_size": 512}},
    ),
    "qwen2_5_vl": (
        "Qwen/Qwen2.5-VL-3B-Instruct",
        {**TEXT, **IDS, "vision_config": {"depth": 4, "fullatt_block_indexes": [1, 3], "out_hidden_size": 512}},
    ),
    "llava": (
        "llava-hf/llava-1.5-7b-hf",
        {
            "image_token_index": 100,
            "text_config": {**TEXT, "num_key_value_heads": 4},
            "vision_config": {
                "hidden_size": 512,
                "intermediate_size": 1024,
                "num_attention_heads": 8,
                "num_hidden_layers": 4,
            },
        },
    ),
    "qwen3_5": (
        "Qwen/Qwen3.5-27B",
        {
            **IDS,
            "text_config": {**TEXT, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 128},
            "vision_config": {"depth": 4, "hidden_size": 512, "out_hidden_size": 512},
        },
    ),
    "llama4": (
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        {
            "image_token_index": 100,
            "text_config": {**TEXT, "head_dim": 128, "num_local_experts": 4, "intermediate_size_mlp": 1024},
            "vision_config": {
                "hidden_size": 256,
                "intermediate_size": 1024,
                "num_attention_heads": 4,
                "num_hidden_layers": 4,
            },
        },
    ),
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"length": 1024},
    "full-checkpointed-padded": {"length": 1024, "batch": 2, "mask": True, "checkpoint_every": 1},
    "adapters-eager": {"method": "lora", "length": 1024, "batch": 2, "mask": True, "attention": "eager"},
}


def _model(name: str) -> dict[str, Any]:
    key, changes = MODELS[name]
    fields = dict(read_spec("models", key.replace("/", "--"))["config"])
    for part, value in changes.items():
        fields[part] = {**fields[part], **value} if isinstance(value, dict) else value
    return fields


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_allocated_peak_is_that_of_the_trace(name: str, case: str) -> None:
    model = _model(name)
    facts = model_from_config(model, key="case", file="config.json", source="test", checked="2026-01-01")
    targets = default_lora_targets(facts, "all-linear")
    settings = replace(config(**{"targets": targets, **CASES[case]}), image_pixels=308 * 336)
    bill = Estimator(facts, ledger_facts(load_gpu("h100-sxm5-80gb"))).price(settings).ledger().gpu
    cublas = sum(entry.bytes for entry in bill.entries if entry.in_allocator and "cublas" in entry.name)
    traced = trace_step(settings, model)
    off = (bill.peak_allocated_bytes - cublas - traced.peak_allocated_bytes) / traced.peak_allocated_bytes
    assert "image of" in traced.assumes[0]
    assert BELOW <= off <= WORST


TOWER = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_labels": 100,
}
TOWER_CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "full-checkpointed": {"checkpoint_every": 1},
    "adapters-every-second-layer": {"method": "lora", "checkpoint_every": 2},
    "4-bit-eager": {"method": "qlora", "attention": "eager"},
}


@pytest.mark.parametrize("case", TOWER_CASES)
def test_a_classifier_of_images_is_its_trace(case: str) -> None:
    model = {**read_spec("models", "google--vit-base-patch16-224")["config"], **TOWER}
    facts = model_from_config(model, key="case", file="config.json", source="test", checked="2026-01-01")
    targets = default_lora_targets(facts, "all-linear")
    settings = config(**{"targets": targets, "batch": 12, "length": 64, **TOWER_CASES[case]})
    bill = Estimator(facts, ledger_facts(load_gpu("h100-sxm5-80gb"))).ledger(settings).gpu
    cublas = sum(entry.bytes for entry in bill.entries if entry.in_allocator and "cublas" in entry.name)
    traced = trace_step(settings, model).peak_allocated_bytes
    assert bill.peak_allocated_bytes - cublas == pytest.approx(traced, rel=0.005)
