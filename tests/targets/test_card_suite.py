"""The suite that measures a card, on a processor: every kind of loop runs, results are kept, and nothing runs twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch_extensions import framework_environment

for name in ("torch", "transformers", "peft", "trl"):
    pytest.importorskip(name)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import torch  # noqa: E402
from cards.cases import Case, cases, other_tasks, tiny  # noqa: E402
from cards.corpus import memory_record, time_record  # noqa: E402
from cards.measuring import measure, prepare  # noqa: E402
from cards.offloading import engine_document  # noqa: E402
from cards.training import training_of  # noqa: E402
from cards.weights import fill  # noqa: E402
from memc.calibration.configs import config_of  # noqa: E402
from memc.config import Engine  # noqa: E402

HERE = [one for one in tiny() if one.config.engine is Engine.SINGLE]


@pytest.mark.parametrize("case", HERE, ids=[one.name for one in HERE])
def test_every_kind_of_loop_is_measured(case: Case) -> None:
    found = measure(case, prepare(case))
    assert found["kind"] == "measured"
    assert found["median_step_seconds"] > 0
    assert len(found["step_seconds"]) >= 3
    record = time_record(case, found | {"cuda": None, "driver": None})
    assert record["step_time_s"] == found["median_step_seconds"]


@pytest.mark.parametrize("case", HERE, ids=[one.name for one in HERE])
def test_a_step_changes_what_trains_and_nothing_else(case: Case) -> None:
    models = prepare(case)
    for model in models:
        fill(model, case.config, torch.device("cpu"))
    phases: list[str] = []
    training = training_of(models, case.config, phases.append)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.1
    frozen = [parameter for model in models for parameter in model.parameters() if not parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in (*training.trained, *frozen)]
    training.step()
    training.step()  # of new adapters one of two matrices is zero, and so is the other one's first gradient
    assert phases == ["forward", "backward", "step"] * 2
    changed = [not torch.equal(old, new) for old, new in zip(before, (*training.trained, *frozen), strict=True)]
    assert any(changed[: len(training.trained)])
    assert not any(changed[len(training.trained) :])


def test_records_carry_the_settings_that_they_were_measured_with() -> None:
    out_of_memory = {"kind": "oom", "error": "", "date": "", "versions": {}, "cuda": "", "driver": "", "python": ""}
    for case in cases():
        record = memory_record(case, out_of_memory | {"device_name": "", "allocator": ""})
        assert config_of(record["settings"]) == case.config


def test_modes_that_were_not_measured_yet_are_in_the_list() -> None:
    kinds = {(one.config.task.value, one.config.reference.value) for one in other_tasks()}
    assert kinds >= {("dpo", "adapters_off"), ("dpo", "model"), ("dpo", "precomputed"), ("classification", "none")}
    engines = [one.config for one in other_tasks() if one.config.zero is not None]
    assert {config.zero_stage for config in engines} == {2, 3}
    assert all(
        engine_document(config)["zero_optimization"]["offload_optimizer"]["device"] == "cpu" for config in engines
    )
    assert any(one.config.lora is not None and one.config.lora.new_tokens for one in other_tasks())


@pytest.mark.slow
def test_two_cases_run_in_processes_of_their_own_and_once(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "card_suite.py"), "--tiny", "--results", str(results)]
    command += ["--only", "new-tokens", "zero2-host"]
    for _ in range(2):
        subprocess.run(command, env=framework_environment(), check=True, timeout=900)
        kept = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        assert [one["kind"] for one in kept] == ["measured", "measured"]
    done = subprocess.run(
        [*command, "--dry-run"], env=framework_environment(), check=True, capture_output=True, text=True
    )
    assert done.stdout.count("there already") == 2
    assert "0 of 2 cases would run" in done.stdout
