"""The ledger against the trace on models whose dimensions are drawn at random, in modes drawn at random."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from trace_cases import config

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.facts import default_lora_targets, load_gpu
from memc.facts.models import model_from_config
from memc.ledger import Estimator, ledger_facts
from memc.trace import trace_step

ABOVE, BELOW = 0.03, 0.01
FACTS = ledger_facts(load_gpu("a100-sxm4-80gb"))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 100},
    "smollm3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "phi3": {"pad_token_id": 0, "max_position_embeddings": 2048, "original_max_position_embeddings": 2048},
    "gemma": {},
    "gemma2": {"sliding_window": 100, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 100, "query_pre_attn_scalar": 32},
}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a config of a described decoder, with 2 to 5 layers; its inner width can be below the hidden one."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    groups, kv_heads = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 4)))
    head_dim = draw(st.sampled_from((16, 32, 40, 64)))
    heads = groups * kv_heads
    width = draw(st.integers(4, 20))
    even = family in ("gemma2", "gemma3_text", "llama", "phi3", "qwen2", "smollm3")  # their configs insist on it
    hidden = heads * head_dim if even else 32 * width
    layers = draw(st.integers(2, 5))
    fields = {
        "model_type": family,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 32 * draw(st.integers(2, 60)),
        "num_hidden_layers": layers,
        "vocab_size": draw(st.integers(500, 6000)),
        "tie_word_embeddings": draw(st.booleans()),
        **FAMILIES[family],
    }
    if family == "gemma3_text":
        fields["layer_types"] = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    return fields


@st.composite
def modes(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the settings of a run."""
    batch, length = draw(st.sampled_from(((1, 768), (2, 320), (3, 200))))
    return {
        "method": draw(st.sampled_from(("full", "lora", "qlora"))),
        "precision": draw(st.sampled_from(("bf16", "bf16_pure"))),
        "attention": draw(st.sampled_from(("sdpa", "eager"))),
        "checkpoint_every": draw(st.sampled_from((0, 1, 2))),
        "task": draw(st.sampled_from(("pretrain", "sft"))),
        "adapters": draw(st.sampled_from(("fp32", "base"))),
        "dropout": draw(st.sampled_from((0.0, 0.1))),
        "mask": batch > 1 and draw(st.booleans()),
        "batch": batch,
        "length": length,
        "rank": draw(st.sampled_from((4, 16))),
        "targets": draw(st.sampled_from(("attention", "all-linear"))),
    }


@given(model=models(), mode=modes())
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_ledger_is_the_trace_on_random_models(model: dict[str, Any], mode: dict[str, Any]) -> None:
    facts = model_from_config(model, key="case", file="config.json", source="test", checked="2026-01-01")
    mode["targets"] = default_lora_targets(facts, mode["targets"])
    if any(group.block.attention.logit_softcap for group in facts.groups):
        mode["attention"] = "eager"
    settings_of_run = config(**mode)
    bill = Estimator(facts, FACTS).ledger(settings_of_run).gpu
    traced = trace_step(settings_of_run, model).peak_allocated_bytes
    off = (bill.peak_allocated_bytes - 2 * FACTS.cublas_workspace_bytes - traced) / traced
    event(f"{model['model_type']} {mode['method']}")
    assert -BELOW <= off <= ABOVE, f"{off:+.2%} of {traced} B"
