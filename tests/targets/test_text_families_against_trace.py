"""The ledger of further text families against the trace of their real modelling code, at small sizes."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from trace_cases import config

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.facts import default_lora_targets, load_gpu
from memc.facts.models import model_from_config
from memc.ledger import Estimator, ledger_facts
from memc.trace import trace_step

WORST = 0.03
BELOW = -0.01
MEDIAN = 0.005
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
ROUTED: dict[str, Any] = {
    **SIZES,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
PAIR: dict[str, Any] = {
    "vocab_size": 2048,
    "d_model": 256,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_ffn_dim": 640,
    "decoder_ffn_dim": 640,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 2048, "hidden_size": 256, "n_layer": 6, "n_head": 4},
    "falcon": SIZES,
    "cohere": SIZES,
    "cohere2": {**SIZES, "sliding_window": 100},
    "ernie4_5": {**SIZES, "hidden_size": 512, "intermediate_size": 1280, "tie_word_embeddings": False},
    "exaone4": {**SIZES, "sliding_window": 100},
    "olmo": SIZES,
    "olmoe": {**ROUTED, "intermediate_size": 128, "num_key_value_heads": 4},
    "qwen2_moe": ROUTED,
    "seed_oss": {**SIZES, "head_dim": 64, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "falcon-new": {**SIZES, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
}
CASES: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "full-checkpointed-eager": {"method": "full", "checkpoint_every": 1, "attention": "eager", "batch": 2},
    "lora-attention-every-second": {"method": "lora", "targets": "attention", "checkpoint_every": 2, "batch": 2},
    "lora-eager-dropout": {"method": "lora", "attention": "eager", "dropout": 0.1},
    "qlora-checkpointed": {"method": "qlora", "checkpoint_every": 1, "batch": 2},
    "full-bf16-weights": {"method": "full", "precision": "bf16_pure", "batch": 2},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "blenderbot": PAIR,
    "mbart": {**PAIR, "max_position_embeddings": 1024},
    "deberta-v2": {
        **{name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
        "max_position_embeddings": 512,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": 64,
        "relative_attention": True,
        "share_att_key": True,
        "type_vocab_size": 0,
    },
    "distilbert": {"vocab_size": 2048, "dim": 256, "hidden_dim": 640, "n_layers": 5, "n_heads": 4, "pad_token_id": 0},
}


def _deviation(model: dict[str, Any], changes: dict[str, Any]) -> float:
    """Returns by what part of the traced peak the ledger is off, the cuBLAS workspaces left out on both sides."""
    facts = model_from_config(model, key="case", file="config.json", source="test", checked="2026-01-01")
    targets = default_lora_targets(facts, changes.get("targets", "all-linear"))
    only_eager = any(group.block.attention.eager_only for group in facts.groups)
    batch = changes.get("batch", 1)
    settings = config(
        **{
            "length": 480 // batch,
            "mask": batch > 1,
            **changes,
            "targets": targets,
            **({"attention": "eager"} if only_eager else {}),
        }
    )
    bill = Estimator(facts, ledger_facts(load_gpu("a100-sxm4-80gb"))).ledger(settings).gpu
    cublas = sum(entry.bytes for entry in bill.entries if entry.in_allocator and "cublas" in entry.name)
    assert cublas > 0
    traced = trace_step(settings, model).peak_allocated_bytes
    return (bill.peak_allocated_bytes - cublas - traced) / traced


@pytest.mark.parametrize("model_type", MODELS)
def test_allocated_peak_is_that_of_the_trace(model_type: str) -> None:
    model = {"model_type": model_type, **MODELS[model_type]}
    off = {name: _deviation(model, changes) for name, changes in CASES.items()}
    assert max(off.values()) <= WORST, off
    assert min(off.values()) >= BELOW, off
    assert median(abs(value) for value in off.values()) <= MEDIAN, off


@pytest.mark.parametrize("model_type", ENCODERS)
def test_encoders_and_pairs_are_near_their_trace(model_type: str) -> None:
    model = {"model_type": model_type, **ENCODERS[model_type]}
    off = {name: _deviation(model, CASES[name]) for name in ("full", "full-bf16-weights")}
    assert max(off.values()) <= WORST, off
    assert min(off.values()) >= BELOW, off
