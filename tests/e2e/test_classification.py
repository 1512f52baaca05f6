"""Models that sort texts into classes really train: small encoders built from their config, whole and with adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import yaml
from folder import inspect_model, launch
from tiny_models import write_tiny

pytestmark = pytest.mark.slow

_LOAD = """
import json, sys
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
base, final, method = sys.argv[1:]
names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
if method == "lora":
    from peft import PeftModel
    model = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base, **names), final)
else:
    model = AutoModelForSequenceClassification.from_pretrained(final)
texts = ["I love this wonderful film number 3", "A dreadful waste of time, film number 3"]
ids = AutoTokenizer.from_pretrained(final)(texts)
said = [model.config.id2label[int(model(torch.tensor([one])).logits.argmax())] for one in ids["input_ids"]]
print(json.dumps(said))
"""
TEXTS = {"good": "I love this wonderful film number {}", "bad": "A dreadful waste of time, film number {}"}


def compile_texts(folder: Path, model: Path, *, method: str, rows: int = 48) -> Path:
    """Returns the compiled folder of a run over texts of two classes."""
    texts = [(label, text.format(number)) for number in range(rows // 2) for label, text in TEXTS.items()]
    lines = [json.dumps({"text": text, "label": label}) + "\n" for label, text in texts]
    (folder / "texts.jsonl").write_text("".join(lines), encoding="utf-8")
    spec = {
        "model": str(model),
        "task": "classification",
        "method": method,
        "data": {"train": "texts.jsonl", "eval": "texts.jsonl", "max_length": 32},
        "training": {
            "global_batch_size": 8, "max_steps": 12, "save_steps": 10, "eval_steps": 12, "learning_rate": 2e-3,
            "lr_scheduler": "constant", "warmup_ratio": 0, "logging_steps": 1, "output_dir": "it",
        },
        "hardware": {"gpu": "rtx-4090"},
    }  # fmt: skip
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    memc = Path(sys.executable).with_name("memc")
    command = [str(memc), "compile", str(folder / "spec.yaml"), "-o", str(folder / "out"), "--no-certify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.mark.parametrize(
    ("kind", "method"),
    [("bert", "full"), ("bert", "lora"), ("roberta", "full"), ("roberta", "lora"), ("modernbert", "full")],
)
def test_texts_are_sorted_after_training(tmp_path: Path, small: Path, kind: str, method: str) -> None:
    model = write_tiny(kind, small, tmp_path / kind)
    out = compile_texts(tmp_path, model, method=method)
    outcome = launch(out, tmp_path)
    assert outcome.status == 0, outcome.text[-4000:]
    assert mean(outcome.losses[-2:]) < 0.5 * mean(outcome.losses[:2]), outcome.losses
    assert "eval_accuracy" in outcome.text
    assert inspect_model(_LOAD, str(model), str(tmp_path / "it" / "final"), method) == ["good", "bad"]
    again = launch(out, tmp_path, "--resume", "--max-steps", "13")
    assert again.status == 0, again.text[-4000:]
    assert len(again.losses) == 1


def test_a_row_of_another_kind_is_named(tmp_path: Path, small: Path) -> None:
    out = compile_texts(tmp_path, write_tiny("bert", small, tmp_path / "bert"), method="full", rows=4)
    with (tmp_path / "texts.jsonl").open("a", encoding="utf-8") as rows:
        rows.write(json.dumps({"text": "A film", "label": 1}) + "\n")
    outcome = launch(out, tmp_path)
    assert outcome.status != 0
    assert "texts.jsonl:5 has text and label and by number, the rows before it have" in outcome.text
