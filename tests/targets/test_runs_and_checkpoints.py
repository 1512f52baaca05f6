"""Which run a checkpoint belongs to: what the emitted script goes on from, and in which words it does not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from memc.config import Engine, Method, Task
from planmaker import make_config
from test_guards import checkpoint, import_script

ROWS = '{"text": "a"}\n'
SETTINGS: dict[str, Any] = {"train_data": "rows.jsonl"}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return import_script(tmp_path_factory.mktemp("run") / "out", make_config(task=Task.SFT), **SETTINGS)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns the folder of a run, in a folder that is the current one and holds its rows."""
    (tmp_path / "rows.jsonl").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "it"


def start(script: ModuleType, place: Path, *words: str, max_steps: int = -1) -> Path | None:
    """Returns where a run with some words on its command line would begin."""
    arguments = SimpleNamespace(resume="--resume" in words, anew="--anew" in words, probe=None, max_steps=max_steps)
    return script.decide_start(arguments, place)  # type: ignore[no-any-return]


def refusal(script: ModuleType, place: Path, *words: str, max_steps: int = -1) -> str:
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    with pytest.raises(script.PlanError) as raised:
        start(script, place, *words, max_steps=max_steps)
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before, "a refusal changes nothing"
    return str(raised.value)


def finish(script: ModuleType, place: Path, steps: int, *, by_epochs: bool = True) -> None:
    """Does what a run does at its end."""
    (place / "final").mkdir()
    script.note_finished(place, steps, by_epochs=by_epochs)


def test_a_run_goes_on_from_its_own_checkpoint(script: ModuleType, place: Path) -> None:
    assert start(script, place, "--resume") is None, "with nothing there, it begins"
    fourth = checkpoint(place, 4, script)
    before = (place / "run.json").stat().st_mtime_ns
    assert start(script, place, "--resume") == fourth
    assert (place / "run.json").stat().st_mtime_ns == before


def test_a_new_run_never_mixes_with_an_earlier_one(script: ModuleType, place: Path) -> None:
    assert start(script, place) is None
    assert start(script, place) is None, "a run that left nothing is in nobody's way"
    checkpoint(place, 10, script)
    checkpoint(place, 8, script)
    finish(script, place, 10)
    said = refusal(script, place)
    assert said.startswith(f"{place} holds checkpoint-8, checkpoint-10, final of an earlier run")
    assert all(word in said for word in ("--resume", "--anew", "--output-dir"))
    for number in (1, 2):
        assert start(script, place, "--anew") is None
        assert sorted(path.name for path in place.iterdir()) == [*["earlier-1", "earlier-2"][:number], "run.json"]
        aside = place / f"earlier-{number}"
        kept = sorted(path.name for path in aside.iterdir())
        assert kept == (
            ["checkpoint-10", "checkpoint-8", "final", "run.json"] if number == 1 else ["final", "run.json"]
        )
        assert json.loads((place / "run.json").read_text())["finished_steps"] == 0
        finish(script, place, 10)


def test_a_finished_run_is_not_resumed(script: ModuleType, place: Path) -> None:
    start(script, place)
    tenth = checkpoint(place, 10, script)
    assert start(script, place, "--resume", max_steps=10) == tenth, "its result was not saved yet"
    finish(script, place, 10)
    for steps in (-1, 10):
        said = refusal(script, place, "--resume", max_steps=steps)
        assert said.startswith(f"this run is finished, {place / 'final'} is its result after 10 steps")
    assert start(script, place, "--resume", max_steps=11) == tenth
    assert "checkpoint-10 has more steps behind it than the 4" in refusal(script, place, "--resume", max_steps=4)
    (place / "final").rmdir()
    assert "checkpoint-10 has more steps behind it than the 4" in refusal(script, place, "--resume", max_steps=4)


def test_more_epochs_go_on_and_a_trial_becomes_the_run(
    script: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(script, place)
    tenth = checkpoint(place, 10, script)
    finish(script, place, 10, by_epochs=False)
    assert start(script, place, "--resume") == tenth, "ten steps were a trial: the epochs have more"
    script.note_finished(place, 10, by_epochs=True)
    refusal(script, place, "--resume")
    monkeypatch.setattr(script, "EPOCHS", script.EPOCHS + 1)
    assert start(script, place, "--resume") == tenth


@pytest.mark.parametrize(
    ("name", "value", "clause"),
    [
        ("MODEL", "other/model", "is 'other/model'"),
        ("LEARNING_RATE", 3e-3, "learning rate was ["),
        ("SEED", 7, "seed was 11 and is 7"),
        ("MAX_LENGTH", 64, "tokens of a row was"),
        ("OPTIMIZER", "adamw_bnb_8bit", "optimizer was"),
        ("GRADIENT_ACCUMULATION_STEPS", 64, "samples of a step was"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    script: ModuleType, place: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, clause: str
) -> None:
    start(script, place)
    fourth = checkpoint(place, 4, script)
    monkeypatch.setattr(script, name, value)
    said = refusal(script, place, "--resume")
    assert said.startswith(f"{fourth} belongs to another run: ")
    assert clause in said


def test_other_rows_are_another_run(script: ModuleType, place: Path) -> None:
    start(script, place)
    checkpoint(place, 4, script)
    (place.parent / "rows.jsonl").write_text(ROWS.replace("a", "b"))
    assert "the rows of the training file are others" in refusal(script, place, "--resume")
    (place.parent / "rows.jsonl").write_text(ROWS)
    assert start(script, place, "--resume") == place / "checkpoint-4"


def test_other_adapters_and_engines_are_another_run(tmp_path: Path, place: Path) -> None:
    lora = make_config(method=Method.LORA)
    assert lora.lora is not None
    first = import_script(tmp_path / "a", lora, **SETTINGS)
    start(first, place)
    checkpoint(place, 4, first)
    other = import_script(tmp_path / "b", replace(lora, lora=replace(lora.lora, rank=64)), **SETTINGS)
    assert " and is 64" in refusal(other, place, "--resume")
    sharded = import_script(tmp_path / "c", make_config(method=Method.LORA, engine=Engine.FSDP), **SETTINGS)
    assert "states kept by was 'torch' and is 'FSDP2'" in refusal(sharded, place, "--resume")


def test_sharing_the_work_out_anew_is_the_same_run(tmp_path: Path, place: Path) -> None:
    """What a higher rung does, or another number of GPUs: the samples of a step stay."""
    one = make_config(micro_batch_size=4, gradient_accumulation_steps=1)
    first = import_script(tmp_path / "a", one, **SETTINGS)
    start(first, place)
    fourth = checkpoint(place, 4, first)
    climbed = replace(one, micro_batch_size=1, gradient_accumulation_steps=2, checkpoint_every=1, engine=Engine.DDP)
    other = import_script(tmp_path / "b", replace(climbed, gpus_per_node=2), **SETTINGS)
    assert start(other, place, "--resume") == fourth


def test_checkpoints_that_do_not_say_whose_they_are_are_not_taken(script: ModuleType, place: Path) -> None:
    checkpoint(place, 4, script)
    assert f"no run.json in {place} says which run checkpoint-4 belongs to" in refusal(script, place, "--resume")
    (place / "run.json").write_text("[]")
    refusal(script, place, "--resume")


def test_what_was_cut_is_moved_out_of_the_way(
    script: ModuleType, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library deletes the oldest by their time: a cut one with a larger number must not pass for the newest."""
    start(script, place)
    second, sixth = checkpoint(place, 2, script), checkpoint(place, 6, script)
    (sixth / "model.safetensors").write_bytes(b"x")
    assert start(script, place, "--resume") == second
    assert sorted(path.name for path in place.iterdir()) == ["checkpoint-2", "incomplete-6", "run.json"]
    assert "checkpoint-6 is not complete" in capsys.readouterr().out


def test_anew_begins(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for other in (["--resume"], ["--probe", "d", "--max-steps", "1"]):
        monkeypatch.setattr(sys, "argv", ["train.py", "--anew", *other])
        with pytest.raises(SystemExit, match="2"):
            script.parse_arguments()
        assert "--anew starts a run from the beginning" in capsys.readouterr().err
