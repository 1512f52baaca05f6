"""What a pin says stands in the plan, whatever the ladder adds to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memc.config import Offload
from memc.facts import load_gpu, load_model
from memc.plan import Infeasible, Plan
from memc.solver import solve
from memc.spec import parse_spec
from yaml import safe_dump

BUDGETS = ("4GiB", "6GiB", "12GiB", "30GiB")


def answer(pin: dict[str, Any], budget: str, objective: str) -> Plan | Infeasible:
    spec = {
        "model": "facebook/opt-6.7b",
        "data": {"train": "t", "max_length": 128, "samples": 50_000},
        "method": "full",
        "objective": objective,
        "training": {"global_batch_size": 32},
        "hardware": {"gpu": "a100-sxm4-40gb", "count": 8, "nodes": 4, "host_memory": "512GiB", "nvme": "2TiB"},
        "memory": {"target": budget},
        "pin": pin,
    }
    loaded = parse_spec(safe_dump(spec), "spec.yaml")
    gpu, model = load_gpu(loaded.spec.hardware.gpu), load_model(loaded.spec.model, base_dir=Path())
    return solve(loaded, model, gpu, loaded.spec.data.samples)


@pytest.mark.parametrize("objective", ["lowest-rung", "fastest"])
@pytest.mark.parametrize(
    "pin",
    [
        {"offload_optimizer": "cpu"},
        {"offload_optimizer": "nvme"},
        {"offload_optimizer": "none"},
        {"offload_param": "none"},
        {"offload_param": "cpu"},
        {"offload_optimizer": "cpu", "offload_param": "cpu"},
        {"offload_optimizer": "cpu", "hybrid_sharding": False},
        {"offload_optimizer": "nvme", "hybrid_sharding": True},
    ],
    ids=str,
)
def test_what_a_pin_says_of_offloading_stands_under_every_budget(pin: dict[str, Any], objective: str) -> None:
    plans = [found for budget in BUDGETS if isinstance(found := answer(pin, budget, objective), Plan)]
    assert plans
    for plan in plans:
        for name in ("offload_optimizer", "offload_param"):
            assert getattr(plan.config, name) == Offload(pin.get(name, getattr(plan.config, name))), plan.techniques


@pytest.mark.parametrize("pin", [{"hybrid_sharding": True}, {"hybrid_sharding": True, "engine": "deepspeed"}], ids=str)
def test_pinned_hybrid_sharding_stands_under_every_budget(pin: dict[str, Any]) -> None:
    plans = [found for budget in BUDGETS if isinstance(found := answer(pin, budget, "lowest-rung"), Plan)]
    assert plans
    for plan in plans:
        zero, fsdp = plan.config.zero, plan.config.fsdp
        assert (zero is not None and zero.hpz_partition == 8) or (fsdp is not None and fsdp.hybrid), plan.techniques


def test_who_pins_checkpoints_to_the_host_gets_checkpoints() -> None:
    for budget in BUDGETS:
        found = answer({"checkpoint_offload": True}, budget, "lowest-rung")
        assert isinstance(found, Infeasible) or (found.config.checkpoint_every and found.config.checkpoint_offload)
