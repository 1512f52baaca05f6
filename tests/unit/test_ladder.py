"""The ladder: one order, honest labels, and a reason whenever a technique cannot be used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memc.config import Engine, Method, Offload, Optimizer, Precision, TrainingConfig
from memc.ladder import LADDER, Dimension, Fidelity, Situation, Technique, technique_names, with_micro_batch
from memc.solver.search import Machine
from planspecs import machine_of, spec_text


def technique(name: str) -> Technique:
    return next(item for item in LADDER if item.name == name)


def machine(**changes: str) -> Machine:
    return machine_of(spec_text(**changes))


def reason(name: str, config: TrainingConfig, situation: Situation) -> str:
    why = technique(name).why_not(config, situation)
    assert why is not None
    return why


def test_names_are_unique_and_rungs_rise() -> None:
    assert len(set(technique_names())) == len(LADDER)
    assert [item.rung for item in LADDER] == sorted(item.rung for item in LADDER)
    assert {item.dimension for item in LADDER} == set(Dimension)


@pytest.mark.parametrize("item", LADDER, ids=technique_names())
def test_every_technique_says_what_it_needs_and_where_it_ends(item: Technique) -> None:
    assert item.needs
    assert item.boundary.endswith(".")
    assert item.accounts
    assert len(set(item.accounts)) == len(item.accounts)
    lossy = (Dimension.STATES, Dimension.METHOD, Dimension.ENGINE_STATES, Dimension.ADAPTERS, Dimension.PRODUCTS)
    changes_numbers = item.dimension in lossy and item.name != "paged-adamw"
    assert item.fidelity is (Fidelity.NUMERICS if changes_numbers else Fidelity.MEMORY)


def test_cheap_techniques_stand_below_dear_ones() -> None:
    """The articles' order: accumulation, checkpointing, adapters, optimizer offload, sharding, parameter offload."""
    order = ["accumulate-2x", "checkpoint-every-layer", "lora", "offload-optimizer", "zero-3", "offload-param"]
    rungs = [technique(name).rung for name in order]
    assert rungs == sorted(set(rungs))


def test_sharding_is_refused_on_one_card_and_over_4_bits() -> None:
    one, two = machine(), machine(count="2", method="qlora")
    for stage in (1, 2, 3):
        assert "one rank" in reason(f"zero-{stage}", one.question.asked, one.question.situation)
    assert technique("zero-2").why_not(two.question.asked, two.question.situation) is None
    assert "4-bit" in reason("zero-3", two.question.asked, two.question.situation)


def test_eight_bit_states_and_deepspeed_exclude_each_other() -> None:
    asked = machine(count="2", host="512GiB", method="full")
    config = replace(asked.question.asked, optimizer=Optimizer.ADAMW_8BIT)
    assert "8-bit" in reason("zero-2", config, asked.question.situation)
    assert "8-bit" in reason("offload-optimizer", config, asked.question.situation)


def test_offload_needs_host_memory_and_its_own_order() -> None:
    without, given = machine(method="full"), machine(method="full", host="512GiB")
    assert "host_memory" in reason("offload-optimizer", without.question.asked, without.question.situation)
    assert "after the optimizer" in reason("offload-param", given.question.asked, given.question.situation)
    offloaded = technique("offload-optimizer").apply(given.question.asked, given.question.situation)
    assert offloaded.engine is Engine.DEEPSPEED
    both = technique("offload-param").apply(offloaded, given.question.situation)
    assert both.zero is not None
    assert (both.zero.stage, both.zero.offload_optimizer, both.zero.offload_param) == (3, Offload.CPU, Offload.CPU)


def test_methods_come_only_from_the_spec() -> None:
    full = machine(method="full")
    for name in ("lora", "qlora"):
        assert "does not allow" in reason(name, full.question.asked, full.question.situation)
    auto = machine(method="auto")
    adapted = technique("qlora").apply(auto.question.asked, auto.question.situation)
    assert (auto.question.asked.method, adapted.method) == (Method.FULL, Method.QLORA)
    assert adapted.lora is not None


def test_bf16_states_need_bf16_and_full_training() -> None:
    old, adapted = machine(gpu="t4", method="full"), machine(method="lora")
    assert old.question.asked.precision is Precision.FP16
    assert "bf16" in reason("bf16-states", old.question.asked, old.question.situation)
    assert "adapters" in reason("bf16-states", adapted.question.asked, adapted.question.situation)


def test_a_smaller_micro_batch_keeps_the_samples_of_a_step() -> None:
    asked = machine(batch="12").question.asked
    assert asked.micro_batch_size == 12
    assert asked.padding_mask
    smaller = with_micro_batch(asked, 1)
    assert (smaller.micro_batch_size, smaller.gradient_accumulation_steps, smaller.padding_mask) == (1, 12, False)
    assert "does not divide by 8" in reason("accumulate-8x", asked, machine().question.situation)


def test_order_on_several_cards_follows_their_links() -> None:
    """Between NVLink cards sharding is cheaper than recomputation; across PCIe it is not."""
    work = {"count": "8", "batch": "16", "length": "512", "method": "full"}
    fast, slow = machine(gpu="h100-sxm5-80gb", **work), machine(gpu="rtx-4090", **work)
    assert fast.rungs["zero-2"] < fast.rungs["checkpoint-every-layer"]
    assert slow.rungs["zero-3"] > slow.rungs["checkpoint-every-layer"]
    assert "zero-2" in fast.order_note
    assert machine().order_note == ""


def test_a_small_micro_batch_stands_behind_recomputation_where_it_costs_more() -> None:
    """Routed experts are read once per micro-batch; a dense model of 2048 tokens keeps the card busy anyway."""
    work = {"count": "8", "batch": "128", "length": "2048", "method": "full", "gpu": "h200-sxm-141gb"}
    routed = machine(model="Qwen/Qwen3-30B-A3B", **work)
    dense = machine(**work)
    behind = routed.rungs["checkpoint-every-layer"]
    assert routed.rungs["accumulate-16x"] == behind + 1
    assert all(rung != behind + 1 for name, rung in routed.rungs.items() if not name.startswith("accumulate"))
    assert "before accumulate" in routed.order_note
    assert dense.rungs["accumulate-16x"] < dense.rungs["checkpoint-every-layer"]
