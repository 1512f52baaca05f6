"""The emitted script's guards: what it refuses, and in which words. Its functions are called as they were written."""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from memc.config import Engine, Method, Offload, Task, TrainingConfig
from memc.render import render
from planmaker import make_config, make_plan, make_run

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def import_script(folder: Path, config: TrainingConfig, **run: Any) -> ModuleType:
    """Returns train.py of a plan, imported here; what the frameworks warn of on import is theirs."""
    from consume import load_script

    folder.mkdir()
    plan = make_plan(config, make_run(**run))
    for name, text in render(plan, spec_name="s", command="c").items():
        (folder / name).write_text(text, encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_script(folder)


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return import_script(tmp_path_factory.mktemp("sft") / "out", make_config(task=Task.SFT))


@pytest.fixture(scope="module")
def pretrain(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return import_script(tmp_path_factory.mktemp("pretrain") / "out", make_config(task=Task.PRETRAIN))


def test_hostile_strings_reach_the_running_script_exactly(tmp_path: Path) -> None:
    hostile = "'\"\\\n$(touch pwned) {{ x }} ..\x00\u2028"
    script = import_script(tmp_path / "out", make_config(task=Task.SFT), model=hostile, train_data=hostile)
    assert hostile == script.MODEL
    assert hostile == script.TRAIN_FILE
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", json.dumps({"text": "x"}) + "\n\n" + json.dumps({"text": "y", "other": 1}), 2),
        ("a.json", json.dumps([{"prompt": "x", "completion": "y"}]), 1),
        ("a.json", json.dumps({"messages": TURNS}) + "\n", 1),
        ("b.jsonl", "\ufeff" + json.dumps({"prompt": TURNS[:1], "completion": TURNS[1:]}), 1),
    ],
)
def test_rows_are_read(sft: ModuleType, tmp_path: Path, name: str, content: str, rows: int) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    found = list(sft.read_rows(str(tmp_path / name), 0, 0))
    assert len(found) == rows
    assert all(set(row) <= set(sft.ROW_KEYS) for row in found)


def test_parquet_rows_are_read(sft: ModuleType, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"messages": [TURNS, TURNS]}), tmp_path / "a.parquet")
    assert list(sft.read_rows(str(tmp_path / "a.parquet"), 0, 0)) == [{"messages": TURNS}] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "x"}\n{"text": ', r"a\.jsonl:2 is not JSON"),
        ("[1]", r"a\.jsonl:1 is no object"),
        ('{"instruction": "x"}', r"a\.jsonl:1 has no usable `messages`.*its fields are \['instruction'\]"),
        ('{"text": ""}', "no usable"),
        ('{"messages": []}', "no usable"),
        ('{"messages": "hello"}', "neither text nor a list of turns"),
        ('{"messages": [{"content": "x"}]}', "neither text nor a list of turns"),
        ('{"text": 3}', "neither text nor a list of turns"),
        ('{"text": "x"}\n{"prompt": "x", "completion": "y"}', r"a\.jsonl:2 has prompt and completion, the rows before"),
    ],
)
def test_unusable_rows_stop_the_run_with_their_place(
    sft: ModuleType, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(sft.PlanError, match=message):
        list(sft.read_rows(str(tmp_path / "a.jsonl"), 0, 0))


def test_missing_and_empty_files_stop_the_run(sft: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(sft.PlanError, match="there is no data file"):
        sft.load_rows(str(tmp_path / "none.jsonl"), None)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(sft.PlanError, match="holds no rows"):
        sft.load_rows(str(tmp_path / "empty.jsonl"), None)


@pytest.mark.parametrize("kind", ["missing_keys", "unexpected_keys", "mismatched_keys"])
def test_incomplete_weights_stop_the_run(sft: ModuleType, kind: str) -> None:
    sft.check_loaded({"missing_keys": set(), "unexpected_keys": [], "mismatched_keys": set()})
    with pytest.raises(sft.PlanError, match=f"1 {kind} \\(model.layers.0.w"):
        sft.check_loaded({kind: {"model.layers.0.w"}})


def checkpoint(folder: Path, step: int, script: ModuleType) -> Path:
    """Returns a checkpoint with a file of its weights and one of a rank's states, written to its end."""
    made = folder / f"checkpoint-{step}"
    (made / f"global_step{step}").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(b"x" * 100)
    (made / f"global_step{step}" / "states.pt").write_bytes(b"x" * 50)
    script.note_sizes(made)
    return made


def test_the_newest_whole_checkpoint_is_resumed(sft: ModuleType, tmp_path: Path) -> None:
    assert sft.last_checkpoint(str(tmp_path / "none")) == (None, [])
    ninth, tenth = checkpoint(tmp_path, 9, sft), checkpoint(tmp_path, 10, sft)
    assert sft.last_checkpoint(str(tmp_path)) == (str(tenth), [])
    (tmp_path / "checkpoint-11").mkdir()
    unfinished = f"{tmp_path / 'checkpoint-11'} is not complete, it was still being written"
    assert sft.last_checkpoint(str(tmp_path)) == (str(tenth), [unfinished])
    states = tenth / "global_step10" / "states.pt"
    states.write_bytes(b"x" * 20)
    cut = f"{tenth} is not complete, global_step10/states.pt has 20 of 50 bytes"
    assert sft.last_checkpoint(str(tmp_path)) == (str(ninth), [unfinished, cut])
    (ninth / "model.safetensors").unlink()
    found, sentences = sft.last_checkpoint(str(tmp_path))
    assert found is None
    assert sentences[-1].endswith("model.safetensors has 0 of 100 bytes")


def first_log(loss: float) -> tuple[SimpleNamespace, dict[str, float]]:
    return SimpleNamespace(global_step=1), {"loss": loss}


def test_a_first_loss_that_no_trained_model_has_stops_the_run(sft: ModuleType) -> None:
    guard = sft.Guard(10.0)
    state, logs = first_log(9.9)
    guard.on_log(None, state, None, logs=logs)
    for loss, message in ((10.1, "--any-first-loss"), (0.0, "no token of its rows carries loss")):
        state, logs = first_log(loss)
        with pytest.raises(sft.PlanError, match=message):
            guard.on_log(None, state, None, logs=logs)
        state.global_step = 2
        guard.on_log(None, state, None, logs=logs)


@pytest.mark.parametrize(
    ("failure", "found"),
    [
        (OSError(28, "No space left on device"), "could not write to"),
        (RuntimeError("I/O error: File too large (os error 27)"), "could not write to"),
        (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/0"), "could not write to"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.1.1]:3"), "another process"),
        (RuntimeError("shapes do not match"), None),
    ],
)
def test_known_failures_say_what_to_do(sft: ModuleType, tmp_path: Path, failure: Exception, found: str | None) -> None:
    later = ValueError("later")
    later.__context__ = failure
    for raised in (failure, later):
        message = sft.known_failure(raised, str(tmp_path / "runs"))
        assert message.startswith(found) if found else message is None
        if found:
            assert " ".join(str(failure).split()) in message
            assert "no checkpoint is complete" in message
    whole = checkpoint(tmp_path / "runs", 4, sft)
    message = sft.known_failure(failure, str(tmp_path / "runs"))
    assert found is None or message.endswith(f"`bash launch.sh --resume` goes on from {whole}")


def test_offload_needs_the_planned_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(engine=Engine.DEEPSPEED, stage=2, method=Method.FULL, offload_optimizer=Offload.CPU)
    script = import_script(tmp_path / "out", config)
    assert script.available_host_bytes() > 2**26
    first, second = SimpleNamespace(local_process_index=0), SimpleNamespace(local_process_index=1)
    monkeypatch.setattr(script, "HOST_MEMORY_BYTES", 3 * 2**30)
    for free, stops in ((2**30, True), (3 * 2**30, False), (None, False)):
        monkeypatch.setattr(script, "available_host_bytes", lambda free=free: free)
        script.check_host_memory(second)
        if stops:
            with pytest.raises(script.PlanError, match=r"up to 3\.0 GiB .* has 1\.0 GiB free.*hardware\.host_memory"):
                script.check_host_memory(first)
        else:
            script.check_host_memory(first)


def test_whole_weights_stop_a_sharded_run(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(4, 4)
    zero3 = import_script(tmp_path / "zero3", make_config(engine=Engine.DEEPSPEED, stage=3, method=Method.FULL))
    with pytest.raises(zero3.PlanError, match=r"2 weights \(weight, \.\.\.\) were loaded whole"):
        zero3.check_loaded_in_shards(model)
    for parameter in model.parameters():
        parameter.ds_id = 1
    zero3.check_loaded_in_shards(model)
    fsdp = import_script(tmp_path / "fsdp", make_config(engine=Engine.FSDP, method=Method.FULL))
    assert fsdp.SHARD_RANKS == 2
    with pytest.raises(fsdp.PlanError, match="holds 20 of 20 weights, planned was a share of one in 2"):
        fsdp.check_sharded(model)
    for parameter in model.parameters():
        parameter.to_local = partial(torch.empty, parameter.numel() // 2)
    fsdp.check_sharded(model)


def test_adapters_that_never_moved_stop_the_run(sft: ModuleType) -> None:
    import torch

    model = torch.nn.Module()
    model.lora_B = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.zeros_(model.lora_B.weight)
    with pytest.raises(sft.PlanError, match=r"1 of 1 lora_B .* are zero after training"):
        sft.check_adapters(model)
    torch.nn.init.ones_(model.lora_B.weight)
    sft.check_adapters(model)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_run(sft: ModuleType, loss: float) -> None:
    meter = sft.Meter(probe=False)
    state = SimpleNamespace(global_step=1, num_input_tokens_seen=0)
    with pytest.raises(sft.PlanError, match="the loss of step 1 is"):
        meter.on_log(None, state, None, logs={"loss": loss})


def test_another_world_or_batch_stops_the_run(sft: ModuleType) -> None:
    right = {"world_size": 1, "n_gpu": 0, "train_batch_size": 1, "gradient_accumulation_steps": 2}
    sft.check_world(SimpleNamespace(**right))
    for change, message in (
        ({"world_size": 2}, "planned for 1 process"),
        ({"n_gpu": 2}, "one process sees 2 GPUs"),
        ({"gradient_accumulation_steps": 4}, "the global batch is 4 samples, planned were 2"),
    ):
        with pytest.raises(sft.PlanError, match=message):
            sft.check_world(SimpleNamespace(**right | change))


def test_synthetic_rows_are_as_long_as_a_row_can_be(sft: ModuleType) -> None:
    rows = sft.synthetic_rows(4, 1, 100)
    assert [len(row) for row in rows["input_ids"]] == [sft.MAX_LENGTH] * 4
    assert max(max(row) for row in rows["input_ids"]) < 100
    assert rows["input_ids"] == sft.synthetic_rows(4, 1, 100)["input_ids"]


def test_pretraining_collator_masks_padding_only(pretrain: ModuleType) -> None:
    collate = pretrain.Collator(pad_token_id=7)
    assert set(collate([{"input_ids": [1, 7]}, {"input_ids": [3, 4]}])) == {"input_ids", "labels"}
    batch = collate([{"input_ids": [1, 7]}, {"input_ids": [3]}])
    assert batch["input_ids"].tolist() == [[1, 7], [3, 7]]
    assert batch["labels"].tolist() == [[1, 7], [3, -100]], "an end token that is also the padding token is learned"
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_command_line_of_the_script(sft: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert sft.parse_arguments().output_dir == "runs/smollm2"
    for wrong in (["--probe", "d"], ["--random-weights"], ["--device", "tpu"]):
        monkeypatch.setattr(sys, "argv", ["train.py", *wrong])
        with pytest.raises(SystemExit, match="2"):
            sft.parse_arguments()


def test_no_gpu_is_an_error_and_not_a_slow_run(sft: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(sft.PlanError, match="--device cpu"):
        sft.start_processes(argparse.Namespace(device="auto"))


def test_engines_differ_in_what_they_import(tmp_path: Path) -> None:
    plain = render(make_plan(make_config(method=Method.FULL)), spec_name="s", command="c")["train.py"]
    sharded = render(make_plan(make_config(engine=Engine.DEEPSPEED, stage=3)), spec_name="s", command="c")["train.py"]
    assert "deepspeed" not in plain.replace('"deepspeed", "bitsandbytes"', "")
    assert "deepspeed.zero.GatheredParameters" in sharded
    assert "memc" not in [line.split()[1] for line in plain.splitlines() if line.startswith(("import ", "from "))]
