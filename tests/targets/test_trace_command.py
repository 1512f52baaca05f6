"""`memc trace`, and the certificate of `memc compile`, with the real frameworks in their own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

SPEC = """\
model: HuggingFaceTB/SmolLM2-135M-Instruct
data: {train: data/train.jsonl, max_length: 256, samples: 175, mean_tokens: 120}
method: lora
training: {epochs: 1, global_batch_size: 8}
hardware: {gpu: t4, count: 1, host_memory: 16GiB}
"""


def memc(folder: Path, *arguments: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "MEMC_CERTIFY"}
    command = [str(Path(sys.executable).with_name("memc")), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


def lock(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "out" / "memc.lock").read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a spec that was compiled and traced."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "spec.yaml").write_text(SPEC, encoding="utf-8")
    done = memc(folder, "compile", "spec.yaml")
    assert "TRACED: " in done.stdout
    assert "note: estimated" not in done.stderr
    return folder


def test_a_compile_marks_its_total_as_traced(compiled: Path) -> None:
    held = lock(compiled)
    (trace,) = held["traces"]
    assert held["ledger"]["gpu"]["grade"] == "traced"
    assert set(trace["versions"]) == {"torch", "transformers", "peft", "trl"}
    assert [item["phase"] for item in trace["phases"]] == ["forward", "loss", "backward", "step"]
    text = (compiled / "out" / "PLAN.md").read_text(encoding="utf-8")
    assert "## As traced" in text
    explained = json.loads(memc(compiled, "explain", "out", "--json").stdout)
    assert explained["traced"]["agrees"]
    assert explained["ledger"]["gpu"]["grade"] == "traced"
    assert json.loads(memc(compiled, "explain", "spec.yaml", "--json").stdout)["traced"] is None


IN_ONE_PROCESS = """
import sys
from memc.cli import main
try:
    main(["compile", "spec.yaml", "--certify"])
finally:
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "peft", "numpy"}))
"""


def test_the_process_that_compiles_loads_no_framework(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    command = [sys.executable, "-c", IN_ONE_PROCESS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "TRACED: " in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_trace_in_the_lock_is_used_again_and_found_current(compiled: Path) -> None:
    before = {path.name: path.read_bytes() for path in (compiled / "out").iterdir()}
    for arguments in (
        ["compile", "spec.yaml"],
        ["compile", "spec.yaml", "--check"],
        ["compile", "spec.yaml", "--no-certify"],
    ):
        assert "current: out" in memc(compiled, *arguments).stderr
    memc(compiled, "check", "out")
    assert {path.name: path.read_bytes() for path in (compiled / "out").iterdir()} == before


def test_a_trace_that_was_edited_is_noticed(compiled: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    (tmp_path / "out").mkdir()
    for path in (compiled / "out").iterdir():
        (tmp_path / "out" / path.name).write_bytes(path.read_bytes())
    held = lock(tmp_path)
    held["traces"][0]["phases"][1]["allocated_bytes"] -= 1 << 26
    (tmp_path / "out" / "memc.lock").write_text(json.dumps(held, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    assert "was edited by hand" in memc(tmp_path, "check", "out", exit_code=4).stdout


def test_the_command_shows_phases_accounts_modules_and_a_timeline(compiled: Path) -> None:
    shown = memc(compiled, "trace", "out", "--modules", "3").stdout
    for part in (
        "TRACED: ",
        "FITS: ",
        "allocated peak by phase",
        "traced peaks by account",
        "who holds it",
        "timeline",
    ):
        assert part in shown or part == "timeline"
    assert "allocated over the step" in shown
    assert "layers.*" in shown
    document = json.loads(memc(compiled, "trace", "spec.yaml", "--json").stdout)
    assert document["schema"] == "memc/trace/1"
    assert document["whole_step"]
    assert document["ledger"]["agrees"]
    traced = document["traced"]
    assert max(point["allocated_bytes"] for point in traced["timeline"]) == traced["peak_allocated_bytes"]
    for phase in traced["phases"]:
        assert sum(phase["by_account"].values()) == phase["allocated_bytes"]
        assert sum(module["allocated_bytes"] for module in phase["modules"]) == phase["allocated_bytes"]
    (kept,) = lock(compiled)["traces"]
    assert [item["allocated_bytes"] for item in kept["phases"]] == [
        item["allocated_bytes"] for item in traced["phases"] if item["phase"] != "load"
    ]


def test_of_a_sharded_plan_one_rank_is_shown(tmp_path: Path) -> None:
    text = SPEC.replace("count: 1", "count: 2") + "pin: {zero_stage: 2}\n"
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    shown = memc(tmp_path, "trace", "spec.yaml").stdout
    assert "PART OF A STEP: what deepspeed shards, gathers and keeps of its own is not traced" in shown
    assert "activations at the peak of each phase" in shown
    assert "FITS" not in shown


def test_a_trace_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    assert "error[trace-too-slow]" in memc(tmp_path, "trace", "spec.yaml", "--timeout", "1", exit_code=2).stderr
    done = memc(tmp_path, "compile", "spec.yaml", "--certify-timeout", "1")
    assert "note: estimated only: the trace was not done after 1 s" in done.stderr
    assert "TRACED" not in done.stdout
    assert lock(tmp_path)["ledger"]["gpu"]["grade"] == "estimated"
