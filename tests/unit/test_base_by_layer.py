"""Loading a 4-bit base under FSDP: cut layer by layer as it is quantised, never whole on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memc.config import Engine, FsdpConfig, Method, Precision, TrainingConfig
from memc.facts import load_gpu, load_model
from memc.ledger.constants import ledger_facts
from memc.ledger.entries import Ledger, Moment, Resource
from memc.ledger.estimate import Estimator
from planmaker import make_config

BF16, FP16 = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-7b-hf"


def config_of(ranks: int, **settings: Any) -> TrainingConfig:
    fsdp = FsdpConfig(**settings)
    return make_config(engine=Engine.FSDP, method=Method.QLORA, gpus_per_node=ranks, fsdp=fsdp, eval_batch_size=0)


def priced(name: str, config: TrainingConfig) -> Ledger:
    return Estimator(load_model(name, base_dir=Path()), ledger_facts(load_gpu("rtx-4090"))).ledger(config)


def held(ledger: Ledger, name: str, resource: Resource = Resource.GPU) -> int:
    return sum(entry.bytes for entry in ledger.of(resource).entries if entry.name == name)


def load_bytes(ledger: Ledger) -> int:
    return sum(e.bytes for e in ledger.gpu.entries if Moment.LOAD in e.moments and e.in_allocator)


def test_embedding_and_head_alone_are_whole_while_a_base_is_cut() -> None:
    ledger = priced(BF16, config_of(2))
    assert held(ledger, "base-weights-before-sharding") == 0
    assert held(ledger, "unit-being-sharded") == 2 * (2 * 128256 * 4096 + 4096)
    codes = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) // 2
    assert held(ledger, "base-weight-shards-4bit") == codes // 2
    shards = next(entry for entry in ledger.gpu.entries if entry.name == "base-weight-shards-4bit")
    assert Moment.LOAD in shards.moments


@pytest.mark.parametrize("settings", [{"loads_by_layer": False}, {"version": 1}])
def test_otherwise_the_base_is_whole_first(settings: dict[str, Any]) -> None:
    whole = priced(BF16, config_of(8, **settings))
    assert held(whole, "unit-being-sharded") == 0
    before = held(whole, "base-weights-before-sharding")
    model = load_model(BF16, base_dir=Path())
    assert before > model.total_params // 2
    assert load_bytes(priced(BF16, config_of(8))) < 0.6 * load_bytes(whole)
    after = next(entry for entry in whole.gpu.entries if entry.name == "base-weight-shards-4bit")
    assert Moment.LOAD not in after.moments


@pytest.mark.parametrize("name", [BF16, FP16, "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen2.5-0.5B"])
def test_more_ranks_never_load_more(name: str) -> None:
    loads = [load_bytes(priced(name, config_of(ranks))) for ranks in (2, 4, 8)]
    assert loads == sorted(loads, reverse=True)
    assert loads[0] > loads[-1]


def test_a_layer_counts_where_it_is_more_than_embedding_and_head() -> None:
    small = load_model(FP16, base_dir=Path())
    small = replace(small, vocab_size=320, embedding_params=320 * 4096, head_params=320 * 4096)
    ledger = Estimator(small, ledger_facts(load_gpu("rtx-4090"))).ledger(config_of(2))
    layer, largest = 4 * 4096**2 + 3 * 4096 * 11008, 4096 * 11008
    unit = held(ledger, "unit-being-sharded")
    assert unit > layer // 2 + 2 * largest
    assert unit < layer + 4 * largest


def test_only_weights_of_another_type_wait_on_the_host_in_4_bits() -> None:
    mapped = priced(BF16, config_of(2))
    assert load_model(BF16, base_dir=Path()).checkpoint_dtype == "bfloat16"
    assert held(mapped, "checkpoint-in-memory", Resource.HOST) < 2 * 5 * 2 * 128256 * 4096
    name, facts = "checkpoint-in-memory", load_model(FP16, base_dir=Path())
    assert facts.checkpoint_dtype == "float16"
    copied = priced(FP16, config_of(2))
    as_saved = priced(FP16, replace(config_of(2), precision=Precision.FP16))
    codes = held(copied, "base-weight-shards-4bit") * 2
    constants = held(copied, "quantization-constants")
    difference = held(copied, name, Resource.HOST) - held(as_saved, name, Resource.HOST)
    assert difference == 2 * (codes + constants)
    assert copied.host.by_moment[Moment.LOAD] > copied.host.by_moment[Moment.FORWARD]
