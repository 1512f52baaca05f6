"""memc probe on a processor: every measurement runs, small, and what it writes is a file that plans read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch_extensions import framework_environment

torch = pytest.importorskip("torch")

from memc.errors import ExitCode  # noqa: E402
from memc.facts.measured import read_measured  # noqa: E402
from memc.probing import cards, hosts  # noqa: E402
from memc.units import MIB  # noqa: E402

CPU = torch.device("cpu")


def test_products_of_every_shape_and_type_have_a_rate() -> None:
    figures, details = cards.products(CPU, 0.2, shapes=((16, 32, 64), (64, 64, 64)))
    assert sorted(figures) == ["matmul_flops_per_second.bf16", "matmul_flops_per_second.fp32"]
    assert all(rate > 0 for rates in figures.values() for rate in rates)
    assert sorted(details["tflops_by_shape"]["fp32"]) == ["16x32x64", "64x64x64"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_product_that_is_timed_is_timed_as_often_as_it_ran() -> None:
    """A product of eight times the operations takes longer, on whatever machine."""
    small, _ = cards.products(CPU, 0.3, shapes=((256, 256, 256),), names=("fp32",))
    seconds = 2 * 256**3 / max(small["matmul_flops_per_second.fp32"])
    assert 1e-6 < seconds < 10


def test_copies_and_optimizers_have_rates() -> None:
    assert all(rate > 1e6 for rate in cards.copies(CPU, 0.05, most_bytes=4 * MIB)["memory_bytes_per_second"])
    assert all(rate > 1e6 for rate in hosts.copies(0.05, most_bytes=4 * MIB)["host_memory_bytes_per_second"])
    assert all(rate > 1e3 for rate in hosts.torch_adam(0.05, most_bytes=MIB)["torch_host_adam_params_per_second"])
    figures, details = cards.transfers(CPU, 0.1, size=MIB)
    assert sorted(figures) == ["pcie_bytes_per_second", "pcie_unpinned_bytes_per_second"]
    slower = min(details["pcie"].values())
    assert figures["pcie_bytes_per_second"][0] / 1e9 < 10 * slower


def test_a_drive_is_written_and_read_and_left_as_it_was(tmp_path: Path) -> None:
    figures, details = hosts.drive(tmp_path, 0.1, most_bytes=32 * MIB)
    assert details["bytes"] == 32 * MIB
    assert all(rate > 1e5 for rates in figures.values() for rate in rates)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_processes_reduce_with_each_other() -> None:
    figures, details = cards.all_reduce(2, 0.2, backend="gloo", size=MIB)
    assert details["gpus"] == 2
    assert all(rate > 1e5 for rate in figures["allreduce_bytes_per_second"])


@pytest.mark.slow
def test_the_command_writes_a_file_that_plans_read(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "memc", "probe", "--seconds", "4", "--only", "host-memory,disk,products"]
    done = subprocess.run(
        [*command, "-o", "m.yaml", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    found = read_measured(tmp_path / "m.yaml")
    assert found.host["host_memory_bytes_per_second"].count >= 1
    assert found.source == document["source"]
    if not torch.cuda.is_available():
        assert document["absent"]["products"] == "this machine has no GPU"
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "model: HuggingFaceTB/SmolLM2-135M-Instruct\ndata: {train: t.jsonl, max_length: 256, samples: 100}\n"
        "method: lora\nhardware: {gpu: t4, file: m.yaml}\n"
    )
    said = subprocess.run(
        [sys.executable, "-m", "memc", "explain", "spec.yaml"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "figures measured on t4 stand in for the catalogue's (m.yaml)" in " ".join(said.stdout.split())


@pytest.mark.slow
def test_the_rate_of_deepspeeds_adam_comes_back_however_long_its_operator_takes_to_compile(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    command = [sys.executable, "-m", "memc", "probe", "--seconds", "10", "--only", "deepspeed-adam", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=framework_environment(), capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    assert document["absent"] == {}
    assert document["host"]["figures"]["host_adam_params_per_second"]["median"] > 1e5


@pytest.mark.slow
def test_an_operator_that_another_process_left_locked_is_said_and_waited_for_by_nobody(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    lock = tmp_path / "operators/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    command = [sys.executable, "-m", "memc", "probe", "--seconds", "2", "--only", "deepspeed-adam", "--json"]
    environment = framework_environment() | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "operators")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert f"rm {lock}" in json.loads(done.stdout)["absent"]["deepspeed-adam"]
    assert lock.exists()


@pytest.mark.parametrize(
    ("torch_module", "said"),
    [('raise ValueError("no torch for you")', "no torch for you"), ("import os; os.kill(os.getpid(), 9)", "signal 9")],
)
def test_a_process_that_measures_nothing_says_why(tmp_path: Path, torch_module: str, said: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(torch_module, encoding="utf-8")
    command = [sys.executable, "-m", "memc", "probe", "--seconds", "2", "--only", "host-memory"]
    environment = framework_environment() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.VERIFICATION_FAILED
    assert "error[probe-stopped]" in done.stderr
    assert said in done.stderr
