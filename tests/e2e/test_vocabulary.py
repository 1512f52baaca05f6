"""Rows of new tokens, or a whole head, really train beside adapters, and are saved with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from folder import DATA, inspect_model, launch

pytestmark = pytest.mark.slow

_SAVED = """
import json, sys
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    names = list(file.keys())
    trained = {name: file.get_tensor(name).float() for name in names if sys.argv[2] in name}
with safe_open(sys.argv[3], "pt") as file:
    start = file.get_tensor("model.embed_tokens.weight").float()
moved = [name for name, tensor in trained.items() if tensor.shape != start.shape or not tensor.equal(start)]
adapters = sum("lora_B" in name for name in names)
shapes = sorted({tuple(tensor.shape) for tensor in trained.values()})
print(json.dumps({"shapes": shapes, "moved": len(moved), "lora_B": adapters}))
"""


@pytest.mark.parametrize(
    ("lora", "part", "shape"),
    [
        ({"new_tokens": ["<think>", "</think>"]}, "trainable_tokens_delta", [2, 576]),
        ({"modules_to_save": ["lm_head"]}, "lm_head", [8192, 576]),
    ],
    ids=["new-rows", "whole-head"],
)
def test_they_train_and_are_saved(
    tmp_path: Path, small: Path, lora: dict[str, Any], part: str, shape: list[int]
) -> None:
    spec = {
        "model": str(small),
        "method": "lora",
        "data": {"train": str(DATA), "max_length": 64},
        "training": {
            "global_batch_size": 4, "max_steps": 3, "save_steps": 2, "learning_rate": 3e-3, "lr_scheduler": "constant",
            "warmup_ratio": 0, "logging_steps": 1, "output_dir": "it",
        },
        "hardware": {"gpu": "rtx-4090"},
        "lora": {"rank": 8, **lora},
        "pin": {"activation_checkpointing": True},
    }  # fmt: skip
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    memc = Path(sys.executable).with_name("memc")
    command = [str(memc), "compile", str(tmp_path / "spec.yaml"), "-o", str(tmp_path / "out"), "--no-certify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("trainable_token_indices" in done.stdout + done.stderr) is ("modules_to_save" in lora), (
        "the cheap way is named"
    )
    outcome = launch(tmp_path / "out", tmp_path)
    assert outcome.status == 0, outcome.text[-4000:]
    written = tmp_path / "it" / "final" / "adapter_model.safetensors"
    found = inspect_model(_SAVED, str(written), part, str(small / "model.safetensors"))
    assert shape in found["shapes"]
    assert found["moved"] > 0
    assert found["lora_B"] == 4 * 7
