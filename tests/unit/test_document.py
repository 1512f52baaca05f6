"""Documents: the contract of `memc explain --json` and of memc.lock."""

from __future__ import annotations

import json
from typing import Any

import pytest
from memc.document import LOCK_SCHEMA, explain_document, ledger_document, lock_document, settings_document
from planspecs import answer_to, plan_of, spec_text

SHAPE = {
    "": (
        "budget calibration clock considered feasible hardware infeasible ledger memc model plan reasons schema spec "
        "traced trail"
    ),
    "plan": "rung settings techniques total_steps warnings",
    "ledger": "gpu host nvme",
    "ledger.gpu": (
        "binding_phase by_account by_phase entries grade peak_allocated_bytes peak_reserved_bytes required_bytes "
        "uncertainty_bytes"
    ),
    "ledger.gpu.by_account": "activations gradients master_weights optimizer_states parameters workspace",
    "ledger.gpu.by_phase": "backward evaluate forward load loss resume save step",
    "clock": (
        "assumptions bandwidth_seconds communication_seconds compute_seconds offload_seconds step_seconds "
        "tokens_per_second_per_gpu tokens_per_step total_seconds total_usd"
    ),
}
FITS = spec_text()
DOES_NOT = spec_text(method="full")


def document(text: str) -> dict[str, Any]:
    return explain_document(answer_to(text), spec_digest="d", resolved={"model": "m"})


@pytest.mark.parametrize("text", [FITS, DOES_NOT], ids=["plan", "refusal"])
@pytest.mark.parametrize("path", SHAPE)
def test_keys_are_those_of_schema_1(text: str, path: str) -> None:
    part: Any = document(text)
    for key in filter(None, path.split(".")):
        part = part[key]
    assert sorted(part) == SHAPE[path].split()


def test_a_plan_and_a_refusal_differ_in_what_they_hold() -> None:
    plan, refusal = document(FITS), document(DOES_NOT)
    assert (plan["schema"], plan["feasible"], plan["infeasible"]) == ("memc/explain/1", True, None)
    assert plan["plan"]["rung"] == 4
    assert refusal["feasible"] is False
    assert refusal["plan"]["rung"] is None
    assert sorted(refusal["infeasible"]) == ["binding", "causes", "relaxations", "shortfall_bytes"]
    assert refusal["infeasible"]["binding"] == "gpu"
    over = refusal["ledger"]["gpu"]["required_bytes"] - refusal["budget"]["gpu_bytes"]
    assert refusal["infeasible"]["shortfall_bytes"] == over > 0


def test_settings_hold_every_choice_under_the_words_of_the_spec() -> None:
    config = plan_of(FITS).config
    settings = settings_document(config)
    assert settings["activation_checkpointing"] == settings["checkpoint_every"] == 1
    assert settings["global_batch_size"] == 16
    assert (settings["zero_stage"], settings["offload_optimizer"], settings["offload_param"]) == (0, "none", "none")
    assert settings["lora"]["target_modules"]
    sharded = settings_document(plan_of(spec_text(count="2", host="512GiB", more="pin: {zero_stage: 2}")).config)
    assert (sharded["zero_stage"], sharded["zero"]["stage"], sharded["world_size"]) == (2, 2, 2)


def test_an_entry_says_phases_and_moments() -> None:
    entries = ledger_document(plan_of(FITS).ledger)["gpu"]["entries"]
    weights = next(entry for entry in entries if entry["name"] == "base-weights")
    assert weights["phases"] == sorted(["load", "forward", "loss", "backward", "step", "evaluate", "save", "resume"])
    assert "backward_first_layer" in weights["moments"]
    assert weights["grade"] == "estimated"
    assert not next(entry for entry in entries if entry["name"] == "cuda-context")["in_allocator"]


def test_the_lock_holds_what_another_machine_needs_and_nothing_of_this_one() -> None:
    plan = plan_of(FITS)
    lock = lock_document(plan, spec_digest="d", resolved={}, files={"train.py": "0"}, command="memc compile s -o out")
    text = json.dumps(lock, sort_keys=True, allow_nan=False)
    assert json.loads(text) == lock
    assert lock["schema"] == LOCK_SCHEMA
    assert lock["files"] == {"train.py": "0"}
    assert lock["measurements"] == []
    assert {item["technique"] for item in lock["provenance"]} == set(plan.techniques)
    assert lock["run"]["model"] == "Qwen/Qwen2.5-7B"
