"""Embedding, head or the rows of new tokens that train beside adapters: the ledger against the trace of PEFT's code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trace_cases import config, llama

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.facts.gpus import load_gpu
from memc.facts.models import model_from_config
from memc.ledger.constants import ledger_facts
from memc.ledger.estimate import Estimator
from memc.trace import trace_step

WORST = 0.01
_SIZES: dict[str, Any] = {
    "vocab_size": 64128,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "architectures": ["LlamaForCausalLM"],
}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "whole-tied": (True, {"modules_to_save": ("embed_tokens",), "trains_embedding": True, "trains_head": True}),
    "whole-head": (False, {"modules_to_save": ("lm_head",), "trains_head": True}),
    "whole-both": (
        False,
        {"modules_to_save": ("embed_tokens", "lm_head"), "trains_embedding": True, "trains_head": True},
    ),
    "rows-tied": (True, {"new_tokens": 2}),
    "rows-untied": (False, {"new_tokens": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_allocated_peak_is_that_of_the_trace(case: str) -> None:
    ledger, traced = figures(case)
    assert ledger == pytest.approx(traced, rel=WORST)


def figures(case: str) -> tuple[int, int]:
    """Returns the allocated peaks of ledger and trace, the cuBLAS workspaces left out on both sides."""
    tied, changes = CASES[case]
    fields = llama(**_SIZES, tie_word_embeddings=tied)
    plain = config(method="lora", task="sft", length=512, checkpoint_every=1)
    assert plain.lora is not None
    settings = replace(plain, lora=replace(plain.lora, **changes))
    facts = model_from_config(fields, key="case", file="config.json", source="test", checked="2026-01-01")
    bill = Estimator(facts, ledger_facts(load_gpu("a100-sxm4-80gb"))).price(settings).ledger().gpu
    cublas = sum(entry.bytes for entry in bill.entries if entry.in_allocator and "cublas" in entry.name)
    return bill.peak_allocated_bytes - cublas, trace_step(settings, fields).peak_allocated_bytes
