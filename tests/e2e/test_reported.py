"""Runs that others reported as failing in silence, held to what each report asks a run to show."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from folder import DATA, inspect_model, launch
from loader import Loader
from memc.config import Engine, Method, Task
from planmaker import make_config
from runs import write_rows
from safetensors_edit import drop_tensor
from specmaker import compile_folder
from tiny_models import write_tiny
from torch_extensions import framework_environment

pytestmark = pytest.mark.slow
VOCABULARY = 8192
BYTES_PER_WEIGHT = 2
_PARAMETERS = """
import json, sys
from transformers import AutoModelForCausalLM
print(json.dumps(sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(sys.argv[1]).parameters())))
"""


def observe(folder: Path, start: Path, *arguments: str) -> dict[str, Any]:
    """Returns how the emitted script ended in a process that looks at its gradients."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("observe.py")), str(folder), *arguments],
        cwd=start, env=framework_environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    lines = [line.removeprefix("OBSERVED ") for line in done.stdout.splitlines() if line.startswith("OBSERVED ")]
    assert lines, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def adapters_of(task: Task, model: Path, place: Path, *, steps: int = 1) -> Path:
    """Returns the compiled folder of adapters on a model whose layers are all checkpointed."""
    write_rows(place / "rows.jsonl", "text", count=8, distinct=8, repeated=4)
    config = make_config(task=task, max_length=64, eval_batch_size=0)
    return compile_folder(
        place / "out", config, model=str(model), train_data="rows.jsonl", output_dir="it", max_steps=steps,
        save_steps=0, learning_rate=5e-3,
    )  # fmt: skip


def without_input_gradients(folder: Path) -> None:
    """Takes away what gives the checkpointed layers an input with a gradient, and recomputes by the old way.

    The library is kept from mending it, which releases of it do and others do not.
    """
    script = folder / "train.py"
    text = script.read_text(encoding="utf-8")
    for before, after in (
        (
            "model.enable_input_require_grads()",
            'setattr(type(model.get_base_model()), "enable_input_require_grads", lambda model: None)',
        ),
        ('"use_reentrant": False', '"use_reentrant": True'),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    script.write_text(text, encoding="utf-8")


@pytest.mark.shows("c03")
@pytest.mark.parametrize(("task", "kind"), [(Task.SFT, "llama"), (Task.PRETRAIN, "qwen3")])
def test_every_adapter_has_a_gradient_after_one_backward(tmp_path: Path, small: Path, task: Task, kind: str) -> None:
    model = small if kind == "llama" else write_tiny(kind, small, tmp_path / kind)
    folder = adapters_of(task, model, tmp_path)
    found = observe(folder, tmp_path, "--any-first-loss")
    assert found["status"] == 0, found["text"][-4000:]
    layers = 4 if kind == "llama" else 2
    assert len(found["gradients"]) == layers * 7 * 2, "A and B of seven linears in each layer, and nothing else"
    assert all(found["gradients"].values()), [name for name, has in found["gradients"].items() if not has]


@pytest.mark.shows("c03")
def test_a_script_without_its_input_gradients_is_seen(tmp_path: Path, small: Path) -> None:
    """The same look at the same run with the mistake of the report in it: no adapter has a gradient."""
    folder = adapters_of(Task.PRETRAIN, small, tmp_path)
    without_input_gradients(folder)
    found = observe(folder, tmp_path, "--any-first-loss")
    assert found["status"] != 0
    assert "does not require grad" in found["text"] or not any(found["gradients"].values()), found["text"][-3000:]


def _with_whole_head(place: Path, model: Path, task: str) -> Path:
    """Returns the compiled folder of adapters beside a head that trains whole, every layer checkpointed."""
    write_rows(place / "rows.jsonl", "text", count=8, distinct=8, repeated=4)
    spec = {
        "model": str(model),
        "task": task,
        "method": "lora",
        "data": {"train": "rows.jsonl", "max_length": 64},
        "training": {
            "global_batch_size": 2, "max_steps": 1, "save_steps": 0, "learning_rate": 5e-3, "lr_scheduler": "constant",
            "warmup_ratio": 0, "logging_steps": 1, "output_dir": "it",
        },
        "hardware": {"gpu": "rtx-4090"},
        "lora": {"modules_to_save": ["lm_head"]},
        "pin": {"activation_checkpointing": True},
    }  # fmt: skip
    (place / "spec.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    memc = Path(sys.executable).with_name("memc")
    command = [str(memc), "compile", str(place / "spec.yaml"), "-o", str(place / "out"), "--no-certify"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place / "out"


@pytest.mark.shows("c09")
@pytest.mark.parametrize(("task", "layers"), [("sft", 4), ("pretrain", 2)], ids=["tied", "untied"])
def test_every_lora_b_moves_in_one_step(tmp_path: Path, small: Path, loader: Loader, task: str, layers: int) -> None:
    """A head that is the embedding gives the layers an input with a gradient, a head of its own does not."""
    model = small if layers == 4 else write_tiny("llama", small, tmp_path / "untied")
    outcome = launch(_with_whole_head(tmp_path, model, task), tmp_path, "--any-first-loss")
    assert outcome.status == 0, outcome.text[-4000:]
    assert len(outcome.losses) == 1
    found = loader.ask(model, tmp_path / "it" / "final")
    assert found.get("error") is None, found["error"]
    assert (found["lora_B"], found["non_zero"]) == (layers * 7, layers * 7)


@pytest.mark.shows("c09")
def test_a_run_whose_adapters_stay_zero_stops_before_it_saves(tmp_path: Path, small: Path) -> None:
    """The head has a gradient, so nothing fails on the way; the script looks at its adapters at the end."""
    folder = _with_whole_head(tmp_path, write_tiny("llama", small, tmp_path / "untied"), "pretrain")
    without_input_gradients(folder)
    outcome = launch(folder, tmp_path, "--any-first-loss")
    assert outcome.status != 0
    assert "lora_B" in outcome.text
    assert "never received a gradient" in outcome.text
    assert not (tmp_path / "it" / "final").exists()


@pytest.mark.shows("d11")
def test_partitioned_weights_are_saved_whole(tmp_path: Path, small: Path) -> None:
    """What ZeRO-3 saves, in the middle and at the end, is within 5 % of two bytes for each weight of the model."""
    write_rows(tmp_path / "rows.jsonl", "chat", count=8, distinct=2)
    config = make_config(
        method=Method.FULL, engine=Engine.DEEPSPEED, stage=3, max_length=64, eval_batch_size=0,
        gradient_accumulation_steps=1,
    )  # fmt: skip
    folder = compile_folder(
        tmp_path / "out", config, model=str(small), train_data="rows.jsonl", output_dir="it", max_steps=1, save_steps=1,
        learning_rate=3e-4,
    )  # fmt: skip
    outcome = launch(folder, tmp_path)
    assert outcome.status == 0, outcome.text[-4000:]
    expected_bytes = BYTES_PER_WEIGHT * inspect_model(_PARAMETERS, str(small))
    for name in ("checkpoint-1", "final"):
        files = (tmp_path / "it" / name).glob("*.safetensors")
        assert sum(file.stat().st_size for file in files) == pytest.approx(expected_bytes, rel=0.05), name


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, small: Path) -> Path:
    """Returns a small mixture of experts whose loss is well below that of guessing."""
    return write_tiny("qwen3_moe", small, tmp_path_factory.mktemp("moe") / "qwen3_moe", rows=DATA)


def _partitioned_experts(place: Path, model: Path) -> Path:
    write_rows(place / "rows.jsonl", "text", count=8, distinct=8, repeated=4)
    config = make_config(
        engine=Engine.DEEPSPEED, stage=3, max_length=64, eval_batch_size=0, gradient_accumulation_steps=1
    )
    return compile_folder(
        place / "out", config, model=str(model), train_data="rows.jsonl", output_dir="it", max_steps=1, save_steps=0,
        learning_rate=3e-4,
    )  # fmt: skip


@pytest.mark.shows("j03")
def test_experts_load_whole_into_shards(tmp_path: Path, experts: Path) -> None:
    """Experts lie one by one in the checkpoint and together in the model: under ZeRO-3 they must arrive there."""
    outcome = launch(_partitioned_experts(tmp_path, experts), tmp_path)
    assert outcome.status == 0, outcome.text[-4000:]
    assert 0 < outcome.losses[0] < 0.9 * math.log(VOCABULARY), outcome.losses


@pytest.mark.shows("j03")
def test_experts_that_are_missing_stop_the_run(tmp_path: Path, experts: Path, small: Path) -> None:
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    for file in experts.iterdir():
        (spoiled / file.name).write_bytes(file.read_bytes())
    drop_tensor(spoiled / "model.safetensors", "model.layers.1.mlp.experts.2.up_proj.weight")
    outcome = launch(_partitioned_experts(tmp_path, spoiled), tmp_path)
    assert outcome.status != 0
    assert "missing_keys" in outcome.text or "mismatched_keys" in outcome.text, outcome.text[-3000:]
    assert not outcome.losses
