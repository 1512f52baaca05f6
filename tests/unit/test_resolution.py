"""Where each value comes from: the spec's line, a default, or memc's decision with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from memc import driver
from memc.cli import main
from memc.plan import Infeasible, Plan
from memc.resolution import Origin, ResolvedValue, resolution
from memc.spec import Spec
from memc.spec_errors import field_paths

LORA = """\
model: Qwen/Qwen2.5-7B-Instruct
data: {train: t.jsonl, max_length: 4096, samples: 10000, mean_tokens: 900}
method: [full, lora]
hardware: {gpu: rtx-4090, count: 1}
time: {budget: none}
"""
FULL = LORA.replace("[full, lora]", "full")
EIGHT = """\
model: meta-llama/Llama-3.1-8B
data: {train: t.jsonl, max_length: 4096, packing: true, eval: e.jsonl, samples: 9000}
method: full
training: {max_steps: 50, global_batch_size: 64, learning_rate: 1e-5}
hardware: {gpu: h100-sxm5-80gb, count: 8, host_memory: 1TiB}
pin: {precision: bf16}
"""


def resolved(text: str, folder: Path) -> tuple[dict[str, ResolvedValue], Plan | Infeasible]:
    (folder / "spec.yaml").write_text(text, encoding="utf-8")
    answer = driver.answer(folder / "spec.yaml")
    return {item.field: item for item in resolution(answer.loaded, answer.result)}, answer.result


@pytest.mark.parametrize("text", [LORA, FULL, EIGHT])
def test_every_field_is_there_once_with_a_reason(text: str, tmp_path: Path) -> None:
    values, _ = resolved(text, tmp_path)
    assert list(values) == field_paths(Spec)
    for item in values.values():
        assert item.reason
        assert bool(item.place) == (item.origin is Origin.SPEC)


def test_what_the_spec_says_names_its_line(tmp_path: Path) -> None:
    values, _ = resolved(LORA, tmp_path)
    assert values["hardware.gpu"].origin is Origin.SPEC
    assert values["hardware.gpu"].place.endswith("spec.yaml:4:17")
    assert values["data.packing"].origin is Origin.DEFAULT


def test_what_memc_decided_is_what_the_plan_holds(tmp_path: Path) -> None:
    values, plan = resolved(LORA, tmp_path)
    assert isinstance(plan, Plan)
    config = plan.config
    expected = {
        "method": config.method.value,
        "training.learning_rate": plan.run.learning_rate,
        "training.save_steps": plan.run.save_steps,
        "memory.target": plan.budget.gpu_bytes,
        "memory.reserve": plan.budget.reserve_bytes,
        "hardware.usd_per_gpu_hour": plan.budget.usd_per_gpu_hour,
        "pin.micro_batch_size": config.micro_batch_size,
        "pin.gradient_accumulation_steps": config.gradient_accumulation_steps,
        "pin.activation_checkpointing": config.checkpoint_every,
        "pin.optimizer": config.optimizer.value,
        "pin.precision": config.precision.value,
        "pin.loss": config.loss.value,
    }
    assert {field: values[field].value for field in expected} == expected
    assert config.lora is not None
    assert values["lora.rank"].value == values["pin.lora_rank"].value == config.lora.rank
    for technique in plan.techniques:
        assert any(technique in item.reason for item in values.values()), technique


def test_reasons_name_the_rung_and_what_it_saves(tmp_path: Path) -> None:
    values, plan = resolved(LORA, tmp_path)
    assert isinstance(plan, Plan)
    record = next(item for item in plan.provenance if item.technique.startswith("accumulate-"))
    assert f"rung {record.rung}, {record.technique}" in values["pin.micro_batch_size"].reason
    assert "of the peak" in values["pin.micro_batch_size"].reason


def test_what_plays_no_part_is_said(tmp_path: Path) -> None:
    values, _ = resolved(EIGHT, tmp_path)
    assert values["pin.lora_rank"].value is None
    assert values["pin.lora_rank"].reason == "not used: method full has no adapters"
    assert values["training.epochs"].reason == "max_steps decides"
    assert values["pin.precision"].origin is Origin.SPEC
    assert "DeepSpeed" in values["pin.overlap_comm"].reason or values["pin.overlap_comm"].value is True


def test_a_refusal_is_resolved_by_what_comes_nearest(tmp_path: Path) -> None:
    values, refusal = resolved(FULL, tmp_path)
    assert isinstance(refusal, Infeasible)
    assert values["training.learning_rate"].reason == "not decided: nothing fits"
    assert values["pin.micro_batch_size"].value == refusal.closest_config.micro_batch_size


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.yaml").write_text(LORA, encoding="utf-8")
    for extra in ((), ("--json",)):
        with pytest.raises(SystemExit) as stop:
            main(["explain", str(tmp_path / "spec.yaml"), "--resolved", *extra])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        if not extra:
            lines = out.splitlines()
            assert lines[0].split() == ["field", "value", "from", "why"]
            assert len(lines) == 1 + len(field_paths(Spec))
            continue
        document = json.loads(out)
        assert set(Spec.model_fields) | {"resolution"} == set(document)
        assert document["training"]["warmup_ratio"] == 0.03
        assert {"field", "value", "origin", "place", "reason"} == set(document["resolution"][0])
