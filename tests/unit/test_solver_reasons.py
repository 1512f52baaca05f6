"""What a plan says of itself, and what a refusal offers: sentences with their figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from memc.config import Offload
from memc.facts import load_gpu, load_model
from memc.plan import Infeasible, Plan
from memc.solver import solve
from memc.solver.resolve import host_bytes_for, usable_host_bytes
from memc.spec import parse_spec
from memc.units import GIB
from yaml import safe_dump


def answer(**changes: Any) -> Plan | Infeasible:
    spec = {
        "model": "Qwen/Qwen2.5-0.5B",
        "task": "pretrain",
        "data": {"train": "train.jsonl", "max_length": 2048, "samples": 10_000},
        "method": "full",
        "training": {"global_batch_size": 16},
        "hardware": {"gpu": "rtx-4090"},
        **changes,
    }
    loaded = parse_spec(safe_dump(spec), "spec.yaml")
    gpu, model = load_gpu(loaded.spec.hardware.gpu), load_model(loaded.spec.model, base_dir=Path())
    return solve(loaded, model, gpu, loaded.spec.data.samples)


def plan_of(**changes: Any) -> Plan:
    found = answer(**changes)
    assert isinstance(found, Plan), found.causes
    return found


def refusal_of(**changes: Any) -> Infeasible:
    found = answer(**changes)
    assert isinstance(found, Infeasible)
    return found


def test_a_plan_says_what_stands_in_the_way_and_what_closes_the_gap() -> None:
    plan = plan_of()
    first, second, *_ = plan.reasons
    assert first.startswith("as asked each GPU needs ")
    assert "in phase loss" in first
    failing = [step for step in plan.trail if step.rung < plan.rung and step.shortfall_bytes]
    nearest = min(failing, key=lambda step: (step.shortfall_bytes or 0, -step.rung))
    assert nearest.technique in second
    assert second.endswith("closes the gap")


def test_a_plan_as_asked_says_only_what_was_not_needed() -> None:
    plan = plan_of(hardware={"gpu": "h200-sxm-141gb"}, data={"train": "t", "max_length": 128, "samples": 10})
    assert plan.techniques == ()
    assert all(reason.startswith("not needed") for reason in plan.reasons)


def test_what_is_not_needed_is_told_with_its_price() -> None:
    plan = plan_of()
    (sentence,) = [reason for reason in plan.reasons if reason.startswith("not needed")]
    assert " the time of a step)" in sentence


def test_a_micro_batch_that_is_not_the_largest_that_fits_is_explained() -> None:
    """Wherever the plan takes a smaller one, both are timed in the sentence."""
    plan = plan_of(objective="fastest", training={"global_batch_size": 64}, hardware={"gpu": "a100-sxm4-80gb"})
    told = [reason for reason in plan.reasons if reason.startswith("micro-batch ")]
    for sentence in told:
        assert f"micro-batch {plan.config.micro_batch_size} takes" in sentence
        assert "the largest that fits" in sentence


@pytest.mark.parametrize("size", [1, 63, 64 * GIB, 693 * GIB + 1])
def test_the_host_keeps_a_fiftieth_and_what_is_offered_gives_enough(size: int) -> None:
    assert usable_host_bytes(host_bytes_for(size)) >= size
    assert usable_host_bytes(size) <= size


def test_the_smallest_micro_batch_that_fits_is_offered_for_a_pinned_one() -> None:
    refusal = refusal_of(pin={"micro_batch_size": 16, "loss": "plain", "activation_checkpointing": False})
    (offer,) = [item for item in refusal.relaxations if item.input == "pin.micro_batch_size"]
    size = int(offer.needed)
    assert size < 16
    again = {"loss": "plain", "activation_checkpointing": False}
    plan_of(pin={**again, "micro_batch_size": size})
    assert isinstance(answer(pin={**again, "micro_batch_size": 2 * size}), Infeasible)


def test_a_technique_that_is_ruled_out_is_offered() -> None:
    refusal = refusal_of(
        ladder={"forbid": ["chunked-loss"]},
        training={"global_batch_size": 1},
        data={"train": "t", "max_length": 16384, "samples": 10},
    )
    (offer,) = [item for item in refusal.relaxations if item.input == "ladder.forbid"]
    assert offer.needed == "nothing"
    assert "chunked-loss left open" in offer.reason


def test_nodes_are_offered_where_a_node_is_full() -> None:
    refusal = refusal_of(
        model="meta-llama/Llama-3.1-70B",
        training={"global_batch_size": 8},
        hardware={"gpu": "a100-sxm4-40gb", "count": 8},
        ladder={"forbid": ["zero-bf16-states", "bf16-states", "bf16-adamw-8bit"]},
    )
    offers = {item.input: item.needed for item in refusal.relaxations}
    field = next(name for name in offers if name.startswith("hardware.nodes"))
    nodes = int(offers[field].split(", ")[0])
    assert nodes in (2, 4, 8, 16)
    if "," in field:
        assert int(offers[field].split(", ")[1]) % (8 * nodes) == 0


def test_money_is_counted_with_evaluations_and_saves() -> None:
    loaded = parse_spec(
        safe_dump(
            {
                "model": "Qwen/Qwen2.5-0.5B",
                "data": {"train": "t.jsonl", "eval": "e.jsonl", "max_length": 1024, "samples": 1000},
                "method": "lora",
                "hardware": {"gpu": "rtx-4090"},
            }
        ),
        "spec.yaml",
    )
    gpu, model = load_gpu("rtx-4090"), load_model("Qwen/Qwen2.5-0.5B", base_dir=Path())
    without = solve(loaded, model, gpu, 1000)
    counted = solve(loaded, model, gpu, 1000, evaluation_samples=500)
    assert isinstance(without, Plan)
    assert isinstance(counted, Plan)
    assert without.clock.total_seconds is not None
    assert counted.clock.total_seconds is not None
    assert counted.clock.total_seconds > without.clock.total_seconds
    assert counted.clock.step_seconds == without.clock.step_seconds


@pytest.mark.parametrize("batch", [3, 12, 14, 45, 48])
def test_a_batch_with_odd_factors_comes_down_to_one_sample(batch: int) -> None:
    plan = plan_of(training={"global_batch_size": batch}, pin={"loss": "plain"}, memory={"target": "14GiB"})
    assert plan.config.micro_batch_size * plan.config.gradient_accumulation_steps == batch
    assert plan.config.micro_batch_size < batch
    if batch == 3:
        assert "accumulate-3x" in plan.techniques


# Three answers that an expert would give, each with the figures it rests on.


def test_a_large_model_on_large_cards_is_told_what_its_states_leave_and_that_no_offload_is_needed() -> None:
    plan = plan_of(
        model="meta-llama/Llama-3.1-70B",
        data={"train": "t", "max_length": 4096, "samples": 10_000},
        training={"global_batch_size": 64},
        hardware={"gpu": "h200-sxm-141gb", "count": 8, "host_memory": "2000GiB"},
    )
    assert plan.config.offload_param is Offload.NONE
    assert plan.config.offload_optimizer is Offload.NONE
    states = next(reason for reason in plan.reasons if reason.startswith("weights, gradients and optimizer states"))
    whole = 16 * plan.model.total_params
    assert f"{whole / GIB:.2f} GiB together" in states
    assert f"divided by 8 they are {whole / 8 / GIB:.2f} GiB on each" in states
    assert any("offload-param" in reason for reason in plan.reasons if reason.startswith("not needed"))


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_a_small_model_with_a_large_vocabulary_is_told_that_the_loss_is_the_wall(loss: str) -> None:
    changes = {"pin": {"micro_batch_size": 8, "loss": loss}, "data": {"train": "t", "max_length": 4096, "samples": 10}}
    found = answer(training={"global_batch_size": 32}, **changes)
    copy = f"{4 * 8 * 4096 * 151_936 / GIB:.2f} GiB"
    said = found.causes if isinstance(found, Infeasible) else found.reasons
    start = "the loss is the wall" if loss == "plain" else "the vocabulary would be the wall"
    wall = next(text for text in said if text.startswith(start))
    assert "32,768 tokens x 151,936 words" in wall
    assert copy in wall
    assert isinstance(found, Infeasible) is (loss == "plain")


def test_a_run_that_is_offloaded_whole_is_told_that_the_host_binds() -> None:
    pins = {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "micro_batch_size": 1}
    hardware = {"gpu": "h100-nvl-94gb", "count": 1, "host_memory": "744GB"}
    changes = {"model": "Qwen/Qwen2.5-32B", "pin": pins, "hardware": hardware}
    plan = plan_of(**changes)
    host = next(reason for reason in plan.reasons if reason.startswith("the host binds before the card"))
    assert "offloaded-adam-moments" in host
    closed = next(reason for reason in plan.reasons if reason.endswith("closes the gap"))
    assert "above the host memory" in closed
    refusal = refusal_of(**{**changes, "pin": {**pins, "bf16_master_weights": False}})
    assert str(refusal.binding) == "host"
    assert any(item.input == "hardware.host_memory" for item in refusal.relaxations)


def test_amounts_in_reasons_are_for_people() -> None:
    for reason in plan_of().reasons:
        assert re.search(r"\d{7,}", reason) is None
