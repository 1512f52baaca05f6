"""The closed forms of the ledger against the trace of the real modelling code."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from trace_cases import config, llama

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.facts.gpus import load_gpu
from memc.facts.models import model_from_config
from memc.ledger.constants import ledger_facts
from memc.ledger.estimate import Estimator
from memc.trace import Instant, Share, trace_step

WORST = 0.03
MEDIAN = 0.005
SIZES = {
    "vocab_size": 32064,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(**SIZES, architectures=["LlamaForCausalLM"]),
    "qwen3-tied": llama(
        **SIZES,
        model_type="qwen3",
        architectures=["Qwen3ForCausalLM"],
        tie_word_embeddings=True,
        use_sliding_window=False,
    ),
}
CASES: dict[str, dict[str, Any]] = {
    "full-bf16-weights": {"precision": "bf16_pure"},
    "full-autocast": {},
    "full-chunked-checkpointed": {"task": "sft", "checkpoint_every": 1},
    "full-every-second-layer": {"precision": "bf16_pure", "checkpoint_every": 2},
    "full-padded": {"mask": True, "batch": 2, "length": 512},
    "full-eager": {"attention": "eager"},
    "full-8bit-optimizer": {"task": "sft", "optimizer": "adamw_8bit"},
    "lora": {"method": "lora", "task": "sft"},
    "lora-checkpointed": {"method": "lora", "task": "sft", "checkpoint_every": 1},
    "lora-bf16-dropout": {"method": "lora", "adapters": "base", "dropout": 0.1},
    "lora-checkpoints-on-host": {"method": "lora", "task": "sft", "checkpoint_every": 1, "hosted": True},
    "full-checkpoints-on-host": {"checkpoint_every": 1, "hosted": True, "mask": True, "batch": 2},
    "qlora": {"method": "qlora", "task": "sft"},
    "qlora-checkpointed": {"method": "qlora", "task": "sft", "checkpoint_every": 1, "length": 2048},
}


def _deviation(model: dict[str, Any], changes: dict[str, Any]) -> float:
    """Returns by what part of the traced peak the ledger is off, the cuBLAS workspaces left out on both sides."""
    settings = config(**{"length": 1024, **changes})
    facts = model_from_config(model, key="case", file="config.json", source="test", checked="2026-01-01")
    bill = Estimator(facts, ledger_facts(load_gpu("a100-sxm4-80gb"))).price(settings).ledger().gpu
    cublas = sum(entry.bytes for entry in bill.entries if entry.in_allocator and "cublas" in entry.name)
    assert cublas > 0
    traced = trace_step(settings, model).peak_allocated_bytes
    return abs(bill.peak_allocated_bytes - cublas - traced) / traced


@pytest.mark.parametrize("changes", [{}, {"method": "lora", "task": "sft"}], ids=["full", "lora"])
def test_checkpoints_on_the_host_are_not_on_the_gpu(changes: dict[str, Any]) -> None:
    model, settings = MODELS["llama"], config(length=1024, checkpoint_every=1, **changes)
    stay, leave = (trace_step(replace(settings, checkpoint_offload=hosted), model) for hosted in (False, True))
    inputs = model["num_hidden_layers"] * 1024 * model["hidden_size"] * 2
    kept = [trace.peaks[Instant.LOSS_FORWARD].shares[Share.SAVED] for trace in (stay, leave)]
    assert inputs * 0.8 <= kept[0] - kept[1] <= inputs * 2  # the residual stream is fp32 in some of the cases
    assert leave.peak_allocated_bytes <= stay.peak_allocated_bytes


@pytest.mark.parametrize("model", MODELS)
def test_allocated_peak_is_that_of_the_trace(model: str) -> None:
    off = {name: _deviation(MODELS[model], changes) for name, changes in CASES.items()}
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= WORST, worst
    assert median(off.values()) <= MEDIAN
