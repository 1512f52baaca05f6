"""Cases of the matrix train a small real model on the CPU: the loss falls, what is saved loads, a run goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import mean

import pytest
from folder import Outcome, launch, launch_nodes
from loader import Loader
from memc.config import TrainingConfig
from runs import CHOSEN, SAVE_STEPS, STEPS, Run, distinct_runs, write_rows
from specmaker import compile_folder
from tiny_models import write_tiny
from tiny_pictures import WORDS as PICTURED
from tiny_pictures import write_picture_rows, write_pictures

pytestmark = pytest.mark.slow
RUNS, _ = distinct_runs()
NAMES = tuple(RUNS) if os.environ.get("MEMC_MATRIX") == "all" else CHOSEN


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Callable[[str], Path]:
    """Returns what gives the folder of a kind of model, made once."""

    @cache
    def folder(kind: str) -> Path:
        if kind == "small":
            return small
        place = tmp_path_factory.mktemp("tiny") / kind
        return write_pictures(kind, small, place) if kind in PICTURED else write_tiny(kind, small, place)

    return folder


def start(folder: Path, place: Path, config: TrainingConfig, *arguments: str) -> Outcome:
    """Returns the outcome of the run; over several nodes, that of the first."""
    if config.nodes == 1:
        return launch(folder, place, *arguments)
    outcomes = launch_nodes(folder, place, *arguments, nodes=config.nodes)
    assert not any(outcome.losses for outcome in outcomes[1:])
    return outcomes[0]


def check_written(base: Path, written: Path, run: Run, loader: Loader) -> None:
    """What was saved is whole, finite, and not what the run started from."""
    found = loader.ask(base, written)
    assert found.get("error") is None, found["error"]
    assert found["finite"]
    if run.config.lora is not None:
        assert (found["lora_B"], found["non_zero"]) == (run.adapters, run.adapters)
        assert not (written / "model.safetensors").exists()
    else:
        assert (found["missing"], found["unexpected"]) == (0, 0)
        assert found["moved"] > 0.7 * found["tensors"]


@pytest.mark.parametrize("name", NAMES)
def test_runs(name: str, tmp_path: Path, models: Callable[[str], Path], loader: Loader) -> None:
    run: Run = RUNS[name]
    config, model = run.config, models(run.model)
    data = "rows.parquet" if run.rows == "parquet" else "rows.jsonl"
    if run.rows == "pictures":
        write_picture_rows(tmp_path, 4 * config.global_batch_size, images=config.images_per_sample)
    else:
        write_rows(tmp_path / data, run.rows, count=4 * config.global_batch_size, distinct=2)
    folder = compile_folder(
        tmp_path / "out of this world", config, model=str(model), train_data=data, output_dir="runs/it",
        max_steps=STEPS, save_steps=SAVE_STEPS, learning_rate=run.learning_rate,
        eval_data=data if config.eval_batch_size else "", eval_steps=STEPS if config.eval_batch_size else 0,
    )  # fmt: skip
    outcome = start(folder, tmp_path, config)
    assert outcome.status == 0, outcome.text[-6000:]
    losses = outcome.losses
    assert len(losses) == STEPS, outcome.text[-3000:]
    assert mean(losses[2:]) < 0.98 * mean(losses[:2]), losses
    assert ("eval_loss" in outcome.text) is (config.eval_batch_size > 0)
    assert all(log["tokens_per_second_per_gpu"] > 0 for log in outcome.logs)
    written = tmp_path / "runs" / "it"
    check_written(model, written / "final", run, loader)

    shutil.rmtree(written / f"checkpoint-{STEPS}")
    shutil.rmtree(written / "final")
    again = start(folder, tmp_path, config, "--resume")
    assert again.status == 0, again.text[-6000:]
    assert again.losses == pytest.approx(losses[SAVE_STEPS:], rel=0.01, abs=0.002), (losses, again.losses)
    assert (written / "final").is_dir()
