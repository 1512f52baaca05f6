"""Figures of a machine that a spec names: how memc probe writes them, and what a plan makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from inprocess import SMALL, Ended, command_runner
from memc.clock import clock_facts
from memc.config import Precision
from memc.facts import load_gpu
from memc.facts.calibration import calibrated, file_calibration
from memc.facts.measured import FIGURES, SWITCH, read_measured, write_measured
from memc.probing import run as running
from memc.probing.parts import PARTS
from memc.probing.run import Probed, probe

WRITE, READ, ADAM, PCIE, PRODUCTS = 0.5e9, 3.5e9, 0.9e9, 11e9, 41e12


@pytest.fixture
def memc(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(SMALL.replace("count: 1,", "count: 1, file: machine.yaml,"))
    return command_runner(capsys)


def probed(**changes: Any) -> Probed:
    values: dict[str, Any] = {
        "card": "t4",
        "machine": {"torch": "2.13.0", "threads": 8, "gpus": 1, "device_name": "Tesla T4", "cuda": "13.0"},
        "figures": {
            "nvme_write_bytes_per_second": [WRITE],
            "nvme_read_bytes_per_second": [READ],
            "host_adam_params_per_second": [ADAM],
            "pcie_bytes_per_second": [PCIE, 1.02 * PCIE, 0.98 * PCIE],
            "matmul_flops_per_second.fp16": [PRODUCTS],
        },
        "details": {"disk": {"direct": True}},
        "absent": {"all-reduce": "this machine has 1 GPU, and it takes 2"},
        "seconds": 60.0,
    }
    return Probed(**{**values, **changes})


def write(found: Probed, path: str = "machine.yaml") -> None:
    write_measured(found.document("2026-11-30"), Path(path), "a machine")


def test_every_figure_belongs_to_one_part_or_is_told_by_runs() -> None:
    of_runs = ("context_bytes", "reserved_over_allocated", "training_flops_per_second")
    for name in FIGURES:
        parts = [part.name for part in PARTS for figure in part.figures if name.startswith(figure)]
        if name.startswith("matmul_flops_per_second."):
            assert parts == ["products"]
        elif not name.startswith(of_runs):
            assert len(parts) == 1, name


def test_what_was_probed_is_what_a_plan_is_timed_with(memc: Callable[..., Ended]) -> None:
    before = clock_facts(load_gpu("t4"), Precision.FP16, 1)
    write(probed())
    gpu = calibrated(load_gpu("t4"), file_calibration(Path("machine.yaml"), "machine.yaml", "t4"))
    facts = clock_facts(gpu, Precision.FP16, 1)
    assert (facts.nvme_write_bytes_per_second, facts.nvme_read_bytes_per_second) == (WRITE, READ)
    assert (facts.host_params_per_second, facts.pcie_bytes_per_second) == (ADAM, PCIE)
    assert facts.flops_per_second == pytest.approx(PRODUCTS * 0.85)
    assert before.pcie_bytes_per_second != PCIE
    assert "5 rates of t4 are the user's own measurements" in facts.assumptions
    done = memc("compile", "spec.yaml")
    assert done.code == 0, done.err
    assert "5 figures measured on t4 were used (machine.yaml)" in done.err
    lock = json.loads(Path("out/memc.lock").read_text())
    assert lock["calibration"]["origin"] == lock["spec"]["resolved"]["hardware"]["file"] == "machine.yaml"
    assert lock["calibration"]["figures"]["pcie_bytes_per_second"]["count"] == 3
    assert "pcie: 11.00 GB/s (median of 3 measurements, 10.78 GB/s to 11.22 GB/s)" in Path("out/PLAN.md").read_text()
    assert memc("check", "out").code == 0
    write(probed(figures={"pcie_bytes_per_second": [1e9]}))
    assert memc("check", "out").code == 4, "the file beside the spec is an input like the spec"


def test_a_file_is_used_in_the_place_of_the_users_own_facts(
    memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(probed())
    write(probed(figures={"pcie_bytes_per_second": [1e9]}), "own.yaml")
    monkeypatch.setenv(SWITCH, "own.yaml")
    assert memc("compile", "spec.yaml").code == 0
    assert json.loads(Path("out/memc.lock").read_text())["calibration"]["origin"] == "machine.yaml"


def test_a_machine_without_a_card_gives_its_host_to_any(memc: Callable[..., Ended]) -> None:
    write(probed(card="", figures={"nvme_write_bytes_per_second": [WRITE]}, machine={"torch": "2.13.0", "threads": 8}))
    assert memc("compile", "spec.yaml").code == 0
    done = memc("calibrate", "machine.yaml", "-o", "own.yaml")
    assert "a machine without a GPU: name it in a spec" in done.err


def test_a_probed_card_is_taken_into_the_users_own_facts(memc: Callable[..., Ended]) -> None:
    write(probed())
    assert memc("calibrate", "machine.yaml", "-o", "own.yaml").code == 0
    own = read_measured(Path("own.yaml")).cards["t4"]
    assert (own["nvme_read_bytes_per_second"].median, own["pcie_bytes_per_second"].median) == (READ, PCIE)


@pytest.mark.parametrize(
    ("key", "code", "said"),
    [("h200", "hardware-file-other-card", "was measured on"), ("", "measured-file-missing", "is not there")],
)
def test_a_file_that_does_not_belong_is_refused_at_its_field(
    memc: Callable[..., Ended], key: str, code: str, said: str
) -> None:
    if key:
        write(probed(card=load_gpu(key).key))
    done = memc("compile", "spec.yaml")
    assert done.code == 2
    assert f"error[{code}]: machine.yaml {said}" in done.err
    assert "spec.yaml:5:" in done.err
    assert "hardware.file" in done.err


def test_without_torch_a_probe_says_what_it_needs(memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.importlib.util, "find_spec", lambda name: None)
    done = memc("probe")
    assert done.code == 2
    assert "error[probe-needs-torch]" in done.err
    assert "error[probe-part]" in memc("probe", "--only", "speed").err
    assert "error[probe-folder]" in memc("probe", "--disk", "gone").err
    assert "all-reduce: allreduce_bytes_per_second" in memc("probe", "--only", "list").out


def _stands_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Makes the measuring process run another program."""
    monkeypatch.setattr(running.importlib.util, "find_spec", lambda name: object())
    popen = subprocess.Popen
    monkeypatch.setattr(
        running.subprocess, "Popen", lambda _command, **how: popen([sys.executable, "-c", program], **how)
    )


def test_a_process_that_ends_early_is_told_with_its_last_lines(
    memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    _stands_in(monkeypatch, "raise SystemExit('no CUDA for you')")
    done = memc("probe")
    assert done.code == 5
    assert "error[probe-stopped]" in done.err
    assert "no CUDA for you" in done.err


def test_a_process_that_hangs_is_ended_and_what_it_measured_is_kept(
    memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_LAST_SECONDS", 0.5)
    lines = [
        {"machine": {"torch": "2.13.0", "threads": 2, "gpus": 0}},
        {"part": "host-memory", "figures": {"host_memory_bytes_per_second": [9e9]}, "details": {}},
    ]
    said = "".join(f"print({json.dumps(line)!r}, flush=True);" for line in lines)
    _stands_in(monkeypatch, f"import time; {said} time.sleep(600)")
    found = probe(seconds=0.1, folder=Path(), parts=["host-memory", "disk"])
    assert found.figures == {"host_memory_bytes_per_second": [9e9]}
    assert found.absent == {"disk": "the time was over"}
    assert found.seconds < 60
    document = yaml.safe_load(yaml.safe_dump(found.document("2026-11-30")))
    assert document["host"]["figures"]["host_memory_bytes_per_second"]["median"] == 9_000_000_000
