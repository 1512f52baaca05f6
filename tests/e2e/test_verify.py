"""`memc verify` on the CPU, whole: the emitted launcher, every phase, states beside the ledger, and several nodes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from memc.config import Engine, Method
from planmaker import make_config
from specmaker import compile_folder
from torch_extensions import framework_environment

pytestmark = pytest.mark.slow


def verify(folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "memc",
        "verify",
        str(folder),
        "--device",
        "cpu",
        "--json",
        *options,
    ]
    return subprocess.Popen(
        command,
        cwd=folder.parent,
        env=framework_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the document of a call that passed, with what it printed while it ran."""
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err[-4000:] + out[-2000:]
    document: dict[str, Any] = json.loads(out)
    return document | {"printed": err}


def kept(folder: Path) -> list[dict[str, Any]]:
    measurements: list[dict[str, Any]] = json.loads((folder / "memc.lock").read_text(encoding="utf-8"))["measurements"]
    return measurements


def test_a_whole_verdict_without_data_weights_or_card(tmp_path: Path, small: Path) -> None:
    """First step, steady state, evaluation, checkpoint, final save and resuming; the states are the ledger's."""
    folder = compile_folder(
        tmp_path / "out", make_config(max_length=32), certify=False, model=str(small), train_data="none.jsonl",
        eval_data="none.jsonl", eval_steps=2,
    )  # fmt: skip
    process = verify(folder, "--synthetic")
    document = ended(process)
    (rank,) = document["ranks"]
    held = {account["account"]: account for account in rank["accounts"]}
    assert set(held) == {"parameters", "gradients", "optimizer_states"}
    for account in held.values():
        assert account["held_bytes"] == pytest.approx(account["ledger_bytes"], rel=0.01), account
        assert account["entries"]
    assert (document["steps"], document["judged"], document["passed"]) == (2, False, True)
    assert document["host_resident_bytes"] > 1e8
    (measurement,) = kept(folder)
    assert measurement["versions"]["torch"]
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize(
    ("engine", "stage"), [(Engine.DEEPSPEED, 2), (Engine.DEEPSPEED, 3), (Engine.FSDP, 0), (Engine.DDP, 0)]
)
def test_every_engine_evaluates_saves_and_resumes_and_its_states_are_weighed(
    tmp_path: Path, small: Path, engine: Engine, stage: int
) -> None:
    config = make_config(
        method=Method.FULL, engine=engine, stage=stage, max_length=32, packing=False, gpus_per_node=2
    )  # fmt: skip
    folder = compile_folder(
        tmp_path / "out", config, certify=False, model=str(small), train_data="none.jsonl", save_steps=2,
        eval_data="none.jsonl", eval_steps=2,
    )  # fmt: skip
    document = ended(verify(folder, "--synthetic"))
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    for rank in document["ranks"]:
        held = {account["account"]: account for account in rank["accounts"]}
        assert held["optimizer_states"]["held_bytes"] == pytest.approx(
            held["optimizer_states"]["ledger_bytes"], rel=0.02
        )
        assert held["parameters"]["held_bytes"] == pytest.approx(held["parameters"]["ledger_bytes"], rel=0.02)
    assert "eval_loss" in document["printed"]
    assert "going on from" in document["printed"]


def test_two_nodes_make_one_measurement(tmp_path: Path, small: Path) -> None:
    config = make_config(
        method=Method.FULL, engine=Engine.DDP, nodes=2, gpus_per_node=1, max_length=32, packing=False, eval_batch_size=0
    )
    folder = compile_folder(tmp_path / "out", config, certify=False, model=str(small), train_data="none.jsonl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"MAIN_PROCESS_IP": "127.0.0.1", "MAIN_PROCESS_PORT": port}
    nodes = [verify(folder, "--synthetic", MACHINE_RANK=str(number), **meeting) for number in range(2)]
    documents = [ended(node) for node in nodes]
    assert [[rank["rank"] for rank in document["ranks"]] for document in documents] == [[0], [1]]
    assert sorted(document["ranks_in_lock"] for document in documents) == [1, 2]
    (measurement,) = kept(folder)
    assert [rank["rank"] for rank in measurement["ranks"]] == [0, 1]
