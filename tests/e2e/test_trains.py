"""Emitted folders really train SmolLM2-135M on real instructions, on the CPU, through their own launcher."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from folder import DATA, Outcome, compile_folder, inspect_model, launch, launch_nodes, render_folder
from memc.config import Engine, FsdpConfig, LossHead, Method, Offload, Task, TrainingConfig
from planmaker import make_config, make_zero

pytestmark = pytest.mark.slow

_LOAD_ADAPTERS = """
import json, sys
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model = PeftModel.from_pretrained(base, sys.argv[2])
b = [p for n, p in model.named_parameters() if "lora_B" in n]
ids = AutoTokenizer.from_pretrained(sys.argv[2])("The capital of France is", return_tensors="pt")
print(json.dumps({"lora_B": len(b), "non_zero": sum(bool(p.any()) for p in b),
                  "finite": bool(model(**ids).logits.isfinite().all())}))
"""
_LOAD_MODEL = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, report = AutoModelForCausalLM.from_pretrained(sys.argv[2], output_loading_info=True)
base = AutoModelForCausalLM.from_pretrained(sys.argv[1]).state_dict()
moved = [name for name, tensor in model.state_dict().items() if not tensor.float().equal(base[name].float())]
AutoTokenizer.from_pretrained(sys.argv[2])
print(json.dumps({"missing": len(report["missing_keys"]), "unexpected": len(report["unexpected_keys"]),
                  "tensors": len(base), "moved": len(moved),
                  "finite": all(bool(t.isfinite().all()) for t in model.state_dict().values())}))
"""


def train(out: Path, config: TrainingConfig, model: Path, steps: int, learning_rate: float) -> tuple[Outcome, Path]:
    """Returns the outcome of a run on the real instructions and the folder it wrote."""
    config = replace(config, max_length=96, packing=False, eval_batch_size=0)
    folder = compile_folder(
        out, config, model=str(model), train_data=str(DATA), output_dir="runs/it", max_steps=steps,
        save_steps=steps - 1, learning_rate=learning_rate,
    )  # fmt: skip
    outcome = launch(folder, out.parent)
    assert outcome.status == 0, outcome.text[-4000:]
    assert len(outcome.losses) == steps
    first, last = mean(outcome.losses[:2]), mean(outcome.losses[-2:])
    assert last < 0.95 * first, outcome.losses
    assert all("tokens_per_second_per_gpu" in log for log in outcome.logs)
    return outcome, out.parent / "runs" / "it"


def resume(out: Path, written: Path, last_step: int) -> None:
    """Goes on from the last checkpoint and checks that only the steps after it ran."""
    outcome = launch(out, out.parent, "--resume", "--max-steps", str(last_step + 1))
    assert outcome.status == 0, outcome.text[-4000:]
    assert len(outcome.losses) == 1, outcome.losses
    state = json.loads((written / f"checkpoint-{last_step}" / "trainer_state.json").read_text())
    assert state["global_step"] == last_step


def check_adapters(model: Path, written: Path) -> None:
    found = inspect_model(_LOAD_ADAPTERS, str(model), str(written / "final"))
    assert found["lora_B"] == 30 * 7
    assert found["non_zero"] == found["lora_B"]
    assert found["finite"]
    assert not (written / "final" / "model.safetensors").exists()


def test_one_process_lora(tmp_path: Path, smollm2: Path) -> None:
    out = tmp_path / "out of this world"
    config = make_config(micro_batch_size=4, padding_mask=True)
    _, written = train(out, config, smollm2, steps=6, learning_rate=2e-3)
    check_adapters(smollm2, written)
    resume(out, written, last_step=6)


def test_two_processes_deepspeed_zero2_full(tmp_path: Path, smollm2: Path) -> None:
    out = tmp_path / "zero2"
    config = make_config(
        method=Method.FULL, engine=Engine.DEEPSPEED, stage=2, micro_batch_size=2, padding_mask=True,
        gradient_accumulation_steps=1,
        zero=make_zero(2, reduce_bucket_elements=50_000_000, allgather_bucket_elements=50_000_000),
    )  # fmt: skip
    _, written = train(out, config, smollm2, steps=5, learning_rate=1e-4)
    found = inspect_model(_LOAD_MODEL, str(smollm2), str(written / "final"))
    assert (found["missing"], found["unexpected"], found["finite"]) == (0, 0, True)
    assert found["moved"] > 0.9 * found["tensors"]
    assert list(written.glob("checkpoint-4/global_step4/*optim_states.pt")), "DeepSpeed did not run the step"
    resume(out, written, last_step=5)


def test_two_processes_deepspeed_zero3_lora(tmp_path: Path, smollm2: Path) -> None:
    out = tmp_path / "zero3"
    config = make_config(
        engine=Engine.DEEPSPEED, stage=3, micro_batch_size=2, padding_mask=True, gradient_accumulation_steps=1
    )
    _, written = train(out, config, smollm2, steps=5, learning_rate=2e-3)
    check_adapters(smollm2, written)
    assert len(list(written.glob("checkpoint-4/global_step4/*optim_states.pt"))) == 2
    resume(out, written, last_step=5)


@pytest.mark.parametrize(
    "settings",
    [FsdpConfig(), FsdpConfig(offload=Offload.CPU), FsdpConfig(sharded_checkpoints=False)],
    ids=["sharded", "offloaded", "whole-checkpoints"],
)
def test_two_processes_fsdp_full(tmp_path: Path, smollm2: Path, settings: FsdpConfig) -> None:
    out = tmp_path / "fsdp"
    config = make_config(
        method=Method.FULL, engine=Engine.FSDP, micro_batch_size=1, gradient_accumulation_steps=2, fsdp=settings
    )
    _, written = train(out, config, smollm2, steps=5, learning_rate=1e-4)
    found = inspect_model(_LOAD_MODEL, str(smollm2), str(written / "final"))
    assert (found["missing"], found["unexpected"], found["finite"]) == (0, 0, True)
    assert found["moved"] > 0.9 * found["tensors"]
    shards = list(written.glob("checkpoint-4/optimizer_0/*.distcp"))
    assert len(shards) == (2 if settings.sharded_checkpoints else 0)
    resume(out, written, last_step=5)


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_two_processes_fsdp_adapters(tmp_path: Path, smollm2: Path, method: Method) -> None:
    out = tmp_path / "fsdp"
    config = make_config(method=method, engine=Engine.FSDP, micro_batch_size=2, padding_mask=True)
    _, written = train(out, config, smollm2, steps=5, learning_rate=2e-3)
    check_adapters(smollm2, written)
    resume(out, written, last_step=5)


def test_two_processes_zero2_bf16_states(tmp_path: Path, smollm2: Path) -> None:
    zero = make_zero(
        2, reduce_bucket_elements=50_000_000, allgather_bucket_elements=50_000_000, bf16_master_weights=True,
        bf16_states=True,
    )  # fmt: skip
    config = make_config(
        method=Method.FULL, engine=Engine.DEEPSPEED, micro_batch_size=2, padding_mask=True,
        gradient_accumulation_steps=1, zero=zero,
    )  # fmt: skip
    _, written = train(tmp_path / "zero2", config, smollm2, steps=5, learning_rate=3e-4)
    assert list(written.glob("checkpoint-4/global_step4/*optim_states.pt"))


def test_two_nodes_shard_within_each(tmp_path: Path, smollm2: Path) -> None:
    """Two launchers on one machine, two processes each: FSDP over the processes of a node, copies across nodes."""
    config = make_config(
        method=Method.FULL, engine=Engine.FSDP, fsdp=FsdpConfig(hybrid=True), nodes=2, max_length=64, packing=False,
        eval_batch_size=0, gradient_accumulation_steps=1,
    )  # fmt: skip
    folder = compile_folder(
        tmp_path / "out", config, model=str(smollm2), train_data=str(DATA), output_dir="runs/it", max_steps=3,
        save_steps=0, learning_rate=1e-4,
    )  # fmt: skip
    first, second = launch_nodes(folder, tmp_path, nodes=2, port=29671)
    assert (first.status, second.status) == (0, 0), first.text[-4000:]
    assert len(first.losses) == 3
    assert not second.losses
    found = inspect_model(_LOAD_MODEL, str(smollm2), str(tmp_path / "runs" / "it" / "final"))
    assert (found["missing"], found["unexpected"], found["finite"]) == (0, 0, True)
    assert found["moved"] > 0.9 * found["tensors"]


def test_one_process_and_two_shards_have_the_same_losses(tmp_path: Path, smollm2: Path) -> None:
    """The same samples in the same order, once on one process and once sharded over two."""
    losses = {}
    for engine, accumulation in ((Engine.SINGLE, 4), (Engine.DDP, 2), (Engine.FSDP, 2)):
        config = make_config(
            method=Method.FULL, engine=engine, gradient_accumulation_steps=accumulation, max_length=96, packing=False,
            eval_batch_size=0,
        )  # fmt: skip
        folder = compile_folder(
            tmp_path / engine.value, config, model=str(smollm2), train_data=str(DATA), output_dir=f"o-{engine}",
            max_steps=4, save_steps=0, learning_rate=1e-4,
        )  # fmt: skip
        outcome = launch(folder, tmp_path)
        assert outcome.status == 0, outcome.text[-4000:]
        losses[engine] = outcome.losses
    for engine in (Engine.DDP, Engine.FSDP):
        assert losses[engine] == pytest.approx(losses[Engine.SINGLE], rel=0.02)


def test_qlora(tmp_path: Path, smollm2: Path) -> None:
    config = make_config(method=Method.QLORA, micro_batch_size=2, padding_mask=True)
    _, written = train(tmp_path / "qlora", config, smollm2, steps=4, learning_rate=2e-3)
    check_adapters(smollm2, written)


@pytest.mark.parametrize("loss", LossHead)
def test_pretrain(tmp_path: Path, smollm2: Path, loss: LossHead) -> None:
    text = tmp_path / "text.jsonl"
    rows = [json.loads(line)["messages"][-1]["content"] for line in DATA.read_text().splitlines()[:40]]
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows if row))
    config = make_config(task=Task.PRETRAIN, method=Method.LORA, loss=loss, max_length=64)
    folder = compile_folder(
        tmp_path / "out", config, model=str(smollm2), train_data=text.name, eval_data=text.name, output_dir="o",
        max_steps=2, save_steps=0, eval_steps=2, learning_rate=1e-3,
    )  # fmt: skip
    outcome = launch(folder, tmp_path)
    assert outcome.status == 0, outcome.text[-4000:]
    assert "eval_loss" in outcome.text
    assert 1 < outcome.losses[0] < 6, "a loss of real weights, and not one of random weights (ln 49152 = 10.8)"


def test_probe_of_random_weights_measures_every_phase(tmp_path: Path, smollm2: Path) -> None:
    folder = compile_folder(
        tmp_path / "out", make_config(max_length=32), model=str(smollm2), train_data="none.jsonl",
        eval_data="none.jsonl", eval_steps=2,
    )  # fmt: skip
    outcome = launch(folder, tmp_path, "--probe", "probe", "--max-steps", "2", "--random-weights")
    assert outcome.status == 0, outcome.text[-4000:]
    report = json.loads((tmp_path / "probe" / "rank0.json").read_text())
    assert report["schema"] == "memc/probe/1"
    assert set(report["phases"]) == {"load", "first_step", "steady", "evaluate", "save"}
    assert (report["rank"], report["world_size"], report["device"], report["error"]) == (0, 1, "cpu", None)
    assert len(report["step_seconds"]) == len(report["losses"]) == 2
    assert report["tokens_per_second"] > 0
    assert report["host_rss_peak_bytes"] > 135e6 * 2
    assert "eval_loss" in outcome.text
    assert [path.name for path in (tmp_path / "probe").iterdir()] == ["rank0.json"]


def test_probe_reports_what_stopped_it(tmp_path: Path, smollm2: Path) -> None:
    config = make_config(max_length=10_000)
    folder = render_folder(tmp_path / "out", config, model=str(smollm2), train_data="none.jsonl")
    outcome = launch(folder, tmp_path, "--probe", "probe", "--max-steps", "2")
    assert outcome.status != 0
    error = json.loads((tmp_path / "probe" / "rank0.json").read_text())["error"]
    assert (error["kind"], error["phase"]) == ("exception", "load")
    assert "knows 8192 positions" in error["message"]
