"""Rows with images: their tokens are those that were planned, and what cannot be used is named with its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folder import launch
from matrix import pictures
from memc.config import TrainingConfig
from pictured import ask
from runs import TORCHVISION
from specmaker import compile_folder
from tiny_pictures import TOKENS_OF_AN_IMAGE, write_picture_rows, write_pictures

pytestmark = pytest.mark.slow
KINDS = ("llava", "gemma3", *(("qwen2_5_vl",) if TORCHVISION else ()))
FORMS = ("parts", "turns", "pair", "inline")
PIXELS = 56 * 84
USER: dict[str, Any] = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "It is red."}
GOOD = "pictures/red-0-0.png"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, small: Path) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("readers")
    return {kind: write_pictures(kind, small, place / kind) for kind in KINDS}


def config_of(kind: str, images: int = 1) -> TrainingConfig:
    """Returns adapters on one process with room for 64 tokens of text."""
    tokens = TOKENS_OF_AN_IMAGE.get(kind, PIXELS // 28**2)
    base = next(config for name, config in pictures().items() if kind in name and config.world_size == 1)
    pixels = PIXELS if kind.startswith("qwen") else base.image_pixels
    return replace(
        base, images_per_sample=images, image_pixels=pixels, max_length=64 + images * tokens, eval_batch_size=0
    )


def compiled(place: Path, models: dict[str, Path], kind: str, images: int = 1) -> Path:
    config = config_of(kind, images)
    return compile_folder(
        place / "out", config, certify=False, model=str(models[kind]), train_data="rows.jsonl", output_dir="runs",
        max_steps=2, save_steps=0, learning_rate=5e-3,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_images_take_the_tokens_that_were_planned(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    folder = compiled(tmp_path, models, kind, images=2)
    for form in FORMS:
        write_picture_rows(tmp_path / form, 2, form=form, images=2)
    said = ask(folder, tmp_path, [tmp_path / form / "rows.jsonl" for form in FORMS])
    planned = 2 * TOKENS_OF_AN_IMAGE.get(kind, PIXELS // 28**2)
    for form, found in zip(FORMS, said.values(), strict=True):
        assert isinstance(found, dict), (form, found)
        if kind in TOKENS_OF_AN_IMAGE:
            assert found["images"] == [planned, planned]
            assert found["pixels"][0] == 4
        assert max(found["images"]) <= planned
        assert planned < found["length"] <= 64 + planned
        assert found["labelled_images"] == 0


def _row(images: Any = (GOOD,), turns: Any = (USER, ANSWER), **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), "images": list(images), **more}


LONG = {"role": "user", "content": [{"type": "text", "text": "word " * 90}, {"type": "image"}]}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (_row(["pictures/gone.png"]), "there is no image file"),
    "no-image": (_row(["notes.txt"]), "cannot be read as an image"),
    "cut": (_row(["cut.png"]), "is damaged"),
    "too-many": (_row([GOOD, GOOD], [{**USER, "content": "both?"}, ANSWER]), "has 2 images, planned were 1"),
    "too-few": (_row([]), "more image parts than its 0 image(s)"),
    "unplaced": (_row([GOOD], [{**USER, "content": [{"type": "image", "image": GOOD}]}]), "no image part"),
    "video": (_row([GOOD], [{"role": "user", "content": [{"type": "video"}]}, ANSWER]), "text or image"),
    "number": (_row([7]), "the path of a file"),
    "tools": (_row(tools=[{"name": "f"}]), "no `tools`"),
    "role": (_row(turns=[USER, {"role": "judge", "content": "x"}]), "no role 'judge'"),
    "completion": ({"prompt": [USER], "completion": [{**USER, "role": "assistant"}], "images": [GOOD]}, "a completion"),
    "cut-off": (_row(turns=[LONG, ANSWER]), "would be cut"),
}  # fmt: skip


def test_what_cannot_be_used_is_named_with_its_line(models: dict[str, Path], tmp_path: Path) -> None:
    folder = compiled(tmp_path, models, "llava")
    write_picture_rows(tmp_path, 2)
    (tmp_path / "notes.txt").write_text("no image", encoding="utf-8")
    whole = (tmp_path / GOOD).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) * 2 // 3])
    first = {"prompt": [USER], "completion": [ANSWER], "images": [GOOD]}
    for name, (row, _) in FAULTS.items():
        lines = [first if name == "completion" else _row(), row]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    said = ask(folder, tmp_path, [tmp_path / f"{name}.jsonl" for name in FAULTS])
    for name, (_, words) in FAULTS.items():
        answer = said[str(tmp_path / f"{name}.jsonl")]
        assert isinstance(answer, str), (name, answer)
        assert words in answer, (name, answer)
        assert f"{name}.jsonl:2" in answer, (name, answer)


def test_a_missing_image_stops_the_run_before_it_trains(models: dict[str, Path], tmp_path: Path) -> None:
    folder = compiled(tmp_path, models, "llava")
    write_picture_rows(tmp_path, 8)
    (tmp_path / "pictures" / "green-1-0.png").unlink()
    outcome = launch(folder, tmp_path)
    assert outcome.status != 0
    assert "rows.jsonl:2: there is no image file" in outcome.text
    assert not outcome.losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_runs_the_largest_images_without_a_processor(
    kind: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = compiled(tmp_path, models, kind, images=2)
    outcome = launch(folder, tmp_path, "--probe", "probe", "--max-steps", "2", "--random-weights")
    assert outcome.status == 0, outcome.text[-4000:]
    report = json.loads((tmp_path / "probe" / "rank0.json").read_text(encoding="utf-8"))
    assert report["error"] is None
    assert len(report["losses"]) == 2
