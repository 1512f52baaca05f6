"""Whole rehearsals: emitted folders under the CUDA build of torch, on cards that do not exist."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memc.config import Engine, Method, Offload, TrainingConfig
from memc.rehearse.shortfall import first_shortfall
from memc.verify.lock import read_lock
from planmaker import make_config
from specmaker import compile_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import cuda_torch

GIB = 1 << 30
SITE = Path(os.environ.get("MEMC_CUDA_TORCH", cuda_torch.PLACE))
THERE = cuda_torch.has_cuda(None) or cuda_torch.has_cuda(SITE)
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.slow,
    pytest.mark.skipif(not THERE, reason="no CUDA build of torch: `make cuda-torch` puts one into build/cuda"),
]

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def rehearse(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the document of `memc rehearse`."""
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH", ""))))
    run = subprocess.run(
        [sys.executable, "-m", "memc", "rehearse", str(folder), "--steps", "2", "--json", *options],
        env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout, run.stderr[-3000:]
    return run.returncode, json.loads(run.stdout)


def folder_of(place: Path, config: TrainingConfig) -> Path:
    """Returns a folder for a configuration of the smallest model that the catalogue has."""
    return compile_folder(place / "out", config, certify=False, model=MODEL, train_data="data/train.jsonl")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights on one card, long rows: forward, loss and step each need more than what comes before."""
    config = make_config(
        method=Method.FULL, max_length=2048, micro_batch_size=2, gradient_accumulation_steps=1, eval_batch_size=0
    )
    return folder_of(tmp_path_factory.mktemp("full"), config)


@pytest.fixture(scope="module")
def zero2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ZeRO-2 on four cards with states kept by the host."""
    config = make_config(engine=Engine.DEEPSPEED, stage=2, method=Method.FULL, offload_optimizer=Offload.CPU)
    config = replace(config, gpus_per_node=4, eval_batch_size=0)
    return folder_of(tmp_path_factory.mktemp("zero2"), config)


def middle_of_sizes_short_in(folder: Path, phase: str) -> int:
    """Returns a card's size, in the middle of those at which the ledger first runs out in this phase."""
    promise = read_lock(folder)
    named = {}
    for size in range(300 << 20, 8 * GIB, 16 << 20):
        first = first_shortfall(promise, size)
        named[size] = None if first is None else first[0].phase.value
    sizes = [size for size, found in named.items() if found == phase]
    together = [size for size in sizes if all(named[one] == phase for one in range(sizes[0], size, 16 << 20))]
    return (together[0] + together[-1]) // 2


def test_a_rank_of_four_is_played_alone_with_its_host(zero2: Path) -> None:
    code, found = rehearse(zero2, "--ranks", "last")
    assert code == 0, found["diagnostics"]
    (rank,) = found["ranks"]
    assert rank["rank"] == 3
    assert [phase["phase"] for phase in rank["phases"]][:3] == ["load", "first_step", "steady"]
    assert rank["host_pinned_peak_bytes"] > 0
    assert read_lock(zero2).path.read_text().count('"rehearsed"') >= 1
    held = {(one["account"], one["place"]): one for one in rank["accounts"]}
    states = held[("optimizer_states", "host")]
    assert states["held_bytes"] == pytest.approx(states["ledger_bytes"], rel=0.02)


@pytest.mark.parametrize("phase", ["forward", "loss", "step"])
def test_too_small_a_card_runs_out_where_the_ledger_says(full: Path, phase: str, tmp_path: Path) -> None:
    capacity = middle_of_sizes_short_in(full, phase)
    copy = shutil.copytree(full, tmp_path / "out")
    code, found = rehearse(copy, "--memory", f"{capacity >> 20}MiB")
    assert code == 5
    (finding,) = found["diagnostics"]
    assert finding["code"] == "out-of-memory"
    assert f" in {phase}. The ledger says {phase}: " in finding["message"]
    assert "Tried to allocate" in " ".join(finding["context"])
    assert "rehearsed" not in (copy / "memc.lock").read_text()


def test_a_4_bit_base_never_lies_whole_on_a_gpu_of_eight(tmp_path: Path) -> None:
    """FSDP cuts each layer as it is quantised: loading takes what the ledger says, and less than the whole base."""
    config = make_config(engine=Engine.FSDP, method=Method.QLORA, gpus_per_node=8, eval_batch_size=0, max_length=256)
    folder = folder_of(tmp_path, config)
    code, found = rehearse(folder, "--ranks", "0")
    assert code == 0, found["diagnostics"]
    load = found["ranks"][0]["phases"][0]
    assert load["phase"] == "load"
    assert load["allocated_bytes"] == pytest.approx(load["ledger_bytes"], rel=0.03)
    assert load["allocated_bytes"] < 106e6 / 2 + 2 * 49152 * 576  # 4-bit linears, and the embedding
