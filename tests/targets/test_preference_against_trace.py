"""Preference training: the ledger's pairs, reference and its forward against the trace of TRL's loss at full depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trace_cases import config, llama

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.config import LossHead, Reference, Task
from memc.facts.gpus import load_gpu
from memc.facts.models import model_from_config
from memc.ledger.constants import ledger_facts
from memc.ledger.estimate import Estimator
from memc.trace import trace_step

WORST = 0.005
_SIZES: dict[str, Any] = {
    "vocab_size": 16032,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "architectures": ["LlamaForCausalLM"],
}
DEEP = llama(**_SIZES, num_hidden_layers=4)
CASES: dict[str, tuple[Reference, dict[str, Any]]] = {
    "model": (Reference.MODEL, {}),
    "model-bf16-weights": (Reference.MODEL, {"precision": "bf16_pure"}),
    "model-checkpointed": (Reference.MODEL, {"checkpoint_every": 1, "length": 2048}),
    "precomputed": (Reference.PRECOMPUTED, {}),
    "adapters-off": (Reference.ADAPTERS_OFF, {"method": "lora"}),
    "adapters-off-checkpointed": (Reference.ADAPTERS_OFF, {"method": "lora", "checkpoint_every": 1, "length": 2048}),
    "adapters-off-4bit": (Reference.ADAPTERS_OFF, {"method": "qlora", "checkpoint_every": 1}),
}


def _figures(reference: Reference, changes: dict[str, Any]) -> tuple[int, int]:
    """Returns the allocated peaks of ledger and trace, the cuBLAS workspaces left out on both sides."""
    plain = config(**{"length": 512, "mask": True, **changes})
    settings = replace(plain, task=Task.DPO, reference=reference, loss=LossHead.CHUNKED)
    facts = model_from_config(DEEP, key="case", file="config.json", source="test", checked="2026-01-01")
    bill = Estimator(facts, ledger_facts(load_gpu("a100-sxm4-80gb"))).price(settings).ledger().gpu
    cublas = sum(entry.bytes for entry in bill.entries if entry.in_allocator and "cublas" in entry.name)
    return bill.peak_allocated_bytes - cublas, trace_step(settings, DEEP).peak_allocated_bytes


@pytest.mark.parametrize("case", CASES)
def test_allocated_peak_is_that_of_the_trace(case: str) -> None:
    ledger, traced = _figures(*CASES[case])
    assert ledger == pytest.approx(traced, rel=WORST)


def test_a_pair_is_two_sequences_and_the_second_model_counts_whole() -> None:
    """Pairs take what twice as many samples of sft take; a second model stands beside them. Ledger and trace alike."""
    with_model, traced_with = _figures(Reference.MODEL, {"precision": "bf16_pure"})
    without, traced_without = _figures(Reference.PRECOMPUTED, {"precision": "bf16_pure"})
    assert with_model - without == pytest.approx(traced_with - traced_without, rel=WORST)
    pairs = config(length=512, mask=True, precision="bf16_pure")
    sft = replace(pairs, task=Task.SFT, loss=LossHead.CHUNKED, micro_batch_size=2 * pairs.micro_batch_size)
    assert traced_without == trace_step(sft, DEEP).peak_allocated_bytes
