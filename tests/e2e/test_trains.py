"""What the matrix of small runs does not show: the whole model, the same losses on one process and two, the probe."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folder import Outcome, launch, render_folder
from loader import Loader
from memc.config import Engine, Method, TrainingConfig
from planmaker import make_config, make_lora
from runs import write_rows
from specmaker import compile_folder

pytestmark = pytest.mark.slow


def test_whole_model_with_adapters(tmp_path: Path, smollm2: Path, loader: Loader) -> None:
    """All thirty layers of SmolLM2-135M: it starts from the loss of real weights, and its adapters move."""
    write_rows(tmp_path / "rows.jsonl", "chat", count=16, distinct=4)
    config = make_config(micro_batch_size=4, padding_mask=True, packing=False, max_length=96, eval_batch_size=0)
    folder = compile_folder(
        tmp_path / "out", config, model=str(smollm2), train_data="rows.jsonl", output_dir="it", max_steps=4,
        save_steps=0, learning_rate=2e-3,
    )  # fmt: skip
    outcome = launch(folder, tmp_path)
    assert outcome.status == 0, outcome.text[-4000:]
    assert 1 < outcome.losses[0] < 6, "a loss of real weights, and not one of random weights (ln 49152 = 10.8)"
    assert outcome.losses[-1] < 0.95 * outcome.losses[0], outcome.losses
    found = loader.ask(smollm2, tmp_path / "it" / "final")
    assert (found["lora_B"], found["non_zero"], found["finite"]) == (30 * 7, 30 * 7, True)


def spread(engine: Engine, stage: int = 0) -> TrainingConfig:
    """Returns the same global batch of four samples on one process or two."""
    return make_config(
        method=Method.FULL, engine=engine, stage=stage, gradient_accumulation_steps=4 if engine is Engine.SINGLE else 2,
        max_length=64, packing=False, eval_batch_size=0,
    )  # fmt: skip


SPREADS = {
    "ddp": spread(Engine.DDP),
    "zero2": spread(Engine.DEEPSPEED, 2),
    "zero3": spread(Engine.DEEPSPEED, 3),
    "fsdp": spread(Engine.FSDP),
}

FOUR_BIT: dict[str, Any] = {"method": Method.QLORA, "lora": make_lora(rank=8)}


def trained(config: TrainingConfig, out: Path, small: Path, **run: Any) -> Outcome:
    """Returns how five steps on rows of unequal length ended."""
    write_rows(out.parent / "rows.jsonl", "chat", count=20, distinct=20)
    folder = compile_folder(
        out, config, model=str(small), train_data="rows.jsonl", output_dir=f"o-{out.name}", max_steps=5, save_steps=0,
        learning_rate=3e-4, **run,
    )  # fmt: skip
    outcome = launch(folder, out.parent)
    assert outcome.status == 0, outcome.text[-4000:]
    return outcome


def losses_of(config: TrainingConfig, out: Path, small: Path) -> list[float]:
    """Returns the losses of five steps on rows of unequal length."""
    return trained(config, out, small).losses


def evaluations_of(config: TrainingConfig, out: Path, small: Path) -> list[float]:
    """Returns the losses of evaluations after two and four of five steps."""
    outcome = trained(replace(config, eval_batch_size=2), out, small, eval_data="rows.jsonl", eval_steps=2)
    return [float(loss) for loss in re.findall(r"'eval_loss': '?([0-9.]+)", outcome.text)]


def test_one_process_and_two_have_the_same_losses(tmp_path: Path, small: Path) -> None:
    """The same samples in the same order: once on one process, and spread over two by every engine."""
    alone = losses_of(spread(Engine.SINGLE), tmp_path / "single", small)
    assert len(alone) == 5
    for name, config in SPREADS.items():
        assert losses_of(config, tmp_path / name, small) == pytest.approx(alone, rel=0.02), name


MOVES_ON_THE_CPU = """
import importlib, itertools
fully_shard = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
def move(params, buffers, device):
    assert all(p.shape[1] > 1 for p in params if isinstance(p, Params4bit)), "quantised before it is moved"
    for tensor in itertools.chain(params, buffers):
        tensor.data = tensor.to(device)
fully_shard._move_states_to_device = move

"""


def test_a_base_that_is_quantised_as_it_is_cut_trains_like_any_other(tmp_path: Path, small: Path) -> None:
    """A 4-bit base whose weights stay pages of the checkpoint until FSDP moves their layer, on two processes.

    FSDP moves nothing on a CPU; here it does what it does for a GPU, and so bitsandbytes quantises layer by layer. The
    losses are those of the same base quantised while it was read, on two processes and on one.
    """
    alone = losses_of(replace(spread(Engine.SINGLE), **FOUR_BIT), tmp_path / "single", small)
    at_once = losses_of(replace(spread(Engine.FSDP), **FOUR_BIT), tmp_path / "fsdp", small)
    script = tmp_path / "fsdp" / "train.py"
    text = script.read_text(encoding="utf-8")
    condition, place = "part_of_a_file and not args.use_cpu", "\nHERE = "
    assert (text.count(condition), text.count(place)) == (1, 1)
    text = text.replace(condition, "part_of_a_file").replace(place, MOVES_ON_THE_CPU + place)
    script.write_text(text, encoding="utf-8")
    outcome = launch(tmp_path / "fsdp", tmp_path, "--anew")
    assert outcome.status == 0, outcome.text[-4000:]
    assert outcome.losses == pytest.approx(at_once, abs=1e-4)
    assert outcome.losses == pytest.approx(alone, rel=0.02)


def test_a_base_in_four_bits_is_evaluated_alike_on_one_process_and_on_two(tmp_path: Path, small: Path) -> None:
    alone = evaluations_of(replace(spread(Engine.SINGLE), **FOUR_BIT), tmp_path / "single", small)
    assert len(alone) >= 2
    both = evaluations_of(replace(spread(Engine.FSDP), **FOUR_BIT), tmp_path / "fsdp", small)
    assert both == pytest.approx(alone, rel=0.02)


def test_probe_of_random_weights_measures_every_phase(tmp_path: Path, small: Path) -> None:
    folder = compile_folder(
        tmp_path / "out", make_config(max_length=32), model=str(small), train_data="none.jsonl",
        eval_data="none.jsonl", eval_steps=2,
    )  # fmt: skip
    outcome = launch(folder, tmp_path, "--probe", "probe", "--max-steps", "2", "--random-weights")
    assert outcome.status == 0, outcome.text[-4000:]
    report = json.loads((tmp_path / "probe" / "rank0.json").read_text())
    assert report["schema"] == "memc/probe/1"
    measured = {"load", "first_step", "steady", "evaluate", "save", "resume", "resumed_step"}
    assert set(report["phases"]) == measured
    assert (report["rank"], report["world_size"], report["device"], report["error"]) == (0, 1, "cpu", None)
    assert len(report["step_seconds"]) == len(report["losses"]) == 2
    assert report["tokens_per_second"] > 0
    assert report["host_rss_peak_bytes"] > 19e6 * 2
    assert "eval_loss" in outcome.text
    assert [path.name for path in (tmp_path / "probe").iterdir()] == ["rank0.json"]


def test_probe_reports_what_stopped_it(tmp_path: Path, small: Path) -> None:
    config = make_config(max_length=10_000)
    folder = render_folder(tmp_path / "out", config, model=str(small), train_data="none.jsonl")
    outcome = launch(folder, tmp_path, "--probe", "probe", "--max-steps", "2")
    assert outcome.status != 0
    error = json.loads((tmp_path / "probe" / "rank0.json").read_text())["error"]
    assert (error["kind"], error["phase"]) == ("exception", "load")
    assert "knows 8192 positions" in error["message"]
