"""What goes wrong on the way is said in one sentence with its place; nothing that was saved is lost; a run goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folder import launch, launch_nodes
from memc.config import Engine, Method, Offload, TrainingConfig
from planmaker import make_config
from runs import write_rows
from safetensors_edit import drop_tensor, scale_tensor
from specmaker import compile_folder
from torch_extensions import framework_environment

pytestmark = pytest.mark.slow

PADDED = make_config(
    method=Method.FULL, micro_batch_size=2, padding_mask=True, packing=False, max_length=64, eval_batch_size=0
)
SETTINGS: dict[str, Any] = {"train_data": "rows.jsonl", "output_dir": "it", "learning_rate": 3e-4}


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    change(document)
    file.write_text(json.dumps(document), encoding="utf-8")


def without_ends(model: Path) -> None:
    """Takes away padding and end token."""
    edit_json(model / "tokenizer_config.json", lambda config: [config.pop(key) for key in ("pad_token", "eos_token")])


def without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


def lines_of(*lines: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "rows.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    return write


GOOD = json.dumps({"text": "The capital of France is Paris."})
LONG_PROMPT = json.dumps({"prompt": "word " * 200, "completion": "never seen"})
ROWS: dict[str, tuple[Callable[[Path], None], str]] = {
    "unreadable-line": (lines_of(GOOD, GOOD, '{"text": "cut'), "rows.jsonl:3 is not JSON"),
    "empty": (lines_of(), "rows.jsonl holds no rows"),
    "prompts-too-long": (lines_of(*[LONG_PROMPT] * 8), "no row of rows.jsonl is left after tokenising"),
}
MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no-end-token": (without_ends, "has no padding and no end token"),
    "no-chat-template": (without_template, "rows.jsonl holds chats, but the tokenizer of"),
    "missing-weight": (
        lambda model: drop_tensor(model / "model.safetensors", "model.layers.1.mlp.up_proj.weight"),
        "1 missing_keys (model.layers.1.mlp.up_proj.weight",
    ),
    "absurd-weights": (
        lambda model: scale_tensor(model / "model.safetensors", "model.norm.weight", 64.0),
        "start with `--any-first-loss` if that is meant",
    ),
}
FINE = {"no-padding-token", "rows-longer-than-max-length"}


def _case(root: Path, name: str, config: TrainingConfig, model: Path, **constants: int) -> dict[str, Any]:
    place = root / name
    place.mkdir(exist_ok=True)
    if not (place / "rows.jsonl").exists():
        write_rows(place / "rows.jsonl", "chat", count=8, distinct=8)
    folder = compile_folder(place / "out", config, model=str(model), max_steps=1, save_steps=0, **SETTINGS)
    return {"folder": str(folder), "start": str(place), "arguments": [], "constants": constants}


def _cases(root: Path, small: Path) -> dict[str, dict[str, Any]]:
    cases = {}
    for name, (write, _) in ROWS.items():
        (root / name).mkdir()
        write(root / name)
        cases[name] = _case(root, name, PADDED, small)
    for name, (spoil, _) in MODELS.items():
        model = root / f"model-{name}"
        shutil.copytree(small, model)
        spoil(model)
        cases[name] = _case(root, name, PADDED, model)
    unpadded = root / "model-unpadded"
    shutil.copytree(small, unpadded)
    edit_json(unpadded / "tokenizer_config.json", lambda config: config.pop("pad_token"))
    cases["no-padding-token"] = _case(root, "no-padding-token", PADDED, unpadded)
    (root / "rows-longer-than-max-length").mkdir()
    write_rows(root / "rows-longer-than-max-length" / "rows.jsonl", "text", count=8, distinct=8, repeated=40)
    cases["rows-longer-than-max-length"] = _case(root, "rows-longer-than-max-length", PADDED, small)
    two = replace(PADDED, engine=Engine.DDP, gpus_per_node=2)
    cases["other-world-size"] = _case(root, "other-world-size", two, small)
    offloaded = make_config(
        method=Method.FULL, engine=Engine.DEEPSPEED, stage=2, offload_optimizer=Offload.CPU, gpus_per_node=1,
        max_length=64, eval_batch_size=0,
    )  # fmt: skip
    cases["little-host-memory"] = _case(root, "little-host-memory", offloaded, small, HOST_MEMORY_BYTES=1 << 60)
    return cases


SENTENCES = {name: sentence for table in (ROWS, MODELS) for name, (_, sentence) in table.items()} | {
    "other-world-size": "planned for 2 process(es), started with 1: start with `bash launch.sh`",
    "little-host-memory": "set hardware.host_memory in the spec to what is there",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, small: Path) -> dict[str, dict[str, Any]]:
    """Returns how each run ended, by name."""
    root = tmp_path_factory.mktemp("faults")
    cases = root / "cases.json"
    cases.write_text(json.dumps(_cases(root, small)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fault_runs.py")), str(cases)],
        env=framework_environment(), capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    lines = [line.removeprefix("ENDED ") for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    found = {report["name"]: report for report in map(json.loads, lines)}
    assert set(found) == set(SENTENCES) | FINE, done.stderr[-4000:]
    return found


@pytest.mark.parametrize("name", SENTENCES)
def test_a_fault_is_said_in_one_sentence(name: str, ended: dict[str, dict[str, Any]]) -> None:
    report = ended[name]
    assert report["status"] == 1, report["text"][-3000:]
    sentences = [line for line in report["text"].splitlines() if line.startswith("train.py: ")]
    assert len(sentences) == 1, report["text"][-3000:]
    assert SENTENCES[name].lower() in sentences[0].lower()
    assert "Traceback" not in report["text"]


@pytest.mark.parametrize("name", sorted(FINE))
def test_what_can_be_mended_is_no_fault(name: str, ended: dict[str, dict[str, Any]]) -> None:
    assert ended[name]["status"] == 0, ended[name]["text"][-3000:]


def test_full_disk_and_cut_checkpoint(tmp_path: Path, small: Path) -> None:
    """A checkpoint that cannot be written stops the run; one that was cut later is passed over for the one before."""
    write_rows(tmp_path / "rows.jsonl", "chat", count=16, distinct=2)
    folder = compile_folder(tmp_path / "out", PADDED, model=str(small), max_steps=4, save_steps=2, **SETTINGS)
    written = tmp_path / "it"
    small_files = launch(folder, tmp_path, file_kib=30_000)
    assert small_files.status != 0
    assert "train.py: could not write to it: " in small_files.text
    assert "GiB are free there" in small_files.text
    assert "no checkpoint is complete" in small_files.text
    assert not (written / "final").exists()

    whole = launch(folder, tmp_path, "--anew")
    assert whole.status == 0, whole.text[-4000:]
    assert "checkpoint-2 of an earlier run are now in it/earlier-1" in whole.text
    weights = written / "checkpoint-4" / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size // 2)
    shutil.rmtree(written / "final")
    again = launch(folder, tmp_path, "--resume")
    assert again.status == 0, again.text[-4000:]
    assert f"checkpoint-4 is not complete, model.safetensors has {size // 2} of {size} bytes" in again.text
    assert f"going on from {Path('it') / 'checkpoint-2'}" in again.text
    assert again.losses == pytest.approx(whole.losses[2:], rel=0.01)
    assert weights.stat().st_size == size
    assert (written / "final").is_dir()


def test_states_of_another_number_of_processes_are_named(tmp_path: Path, small: Path) -> None:
    """ZeRO cannot share out anew what two processes saved: a run on one stops with a sentence, and nothing is lost."""
    write_rows(tmp_path / "rows.jsonl", "chat", count=8, distinct=2)
    two = make_config(
        method=Method.FULL, engine=Engine.DEEPSPEED, stage=2, max_length=64, eval_batch_size=0,
        gradient_accumulation_steps=1,
    )  # fmt: skip
    folder = compile_folder(tmp_path / "two", two, model=str(small), max_steps=1, save_steps=1, **SETTINGS)
    assert launch(folder, tmp_path).status == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "it").rglob("*") if path.is_file()}
    one = replace(two, gpus_per_node=1, gradient_accumulation_steps=2)
    folder = compile_folder(tmp_path / "one", one, model=str(small), max_steps=2, save_steps=1, **SETTINGS)
    outcome = launch(folder, tmp_path, "--resume")
    assert outcome.status != 0
    assert "checkpoint-1 holds optimizer states of another number of processes: " in outcome.text, outcome.text[-4000:]
    assert "DP world size of 2 but the current world size is 1" in outcome.text
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "it").rglob("*") if path.is_file()} == before


def test_a_killed_rank_ends_the_run_and_it_goes_on(tmp_path: Path, small: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", "chat", count=32, distinct=2)
    config = replace(PADDED, engine=Engine.DDP, gpus_per_node=2, gradient_accumulation_steps=1)
    folder = compile_folder(tmp_path / "out", config, model=str(small), max_steps=500, save_steps=2, **SETTINGS)
    log = tmp_path / "killed.log"
    with log.open("wb") as target:
        process = subprocess.Popen(
            ["bash", str(folder / "launch.sh"), "--device", "cpu"],
            cwd=tmp_path, env=framework_environment(), stdout=target, stderr=target, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for(lambda: list((tmp_path / "it").glob("checkpoint-*/sizes.json")) or process.poll() is not None)
        ranks = _ranks(folder)
        assert len(ranks) == 2, log.read_text()[-4000:]
        os.kill(ranks[-1], signal.SIGKILL)
        assert process.wait(timeout=300) != 0
        assert not _ranks(folder)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in _ranks(folder):
            os.kill(rank, signal.SIGKILL)
    text = log.read_text(encoding="utf-8", errors="replace")
    assert "Signal 9 (SIGKILL)" in text, text[-4000:]
    assert "train.py: another process of this run ended" in text or "Sending process" in text, text[-4000:]
    done = max(int(path.parent.name[11:]) for path in (tmp_path / "it").glob("checkpoint-*/sizes.json"))
    again = launch(folder, tmp_path, "--resume", "--max-steps", str(done + 1))
    assert again.status == 0, again.text[-4000:]
    assert len(again.losses) == 1, "nothing that was saved was trained again"


def test_an_earlier_run_is_neither_mixed_with_a_new_one_nor_taken_for_it(tmp_path: Path, small: Path) -> None:
    """A finished run lies in the output folder: other rows, other settings and fewer steps make runs of their own."""
    write_rows(tmp_path / "rows.jsonl", "chat", count=8, distinct=2)
    folder = compile_folder(tmp_path / "out", PADDED, model=str(small), max_steps=2, save_steps=1, **SETTINGS)
    assert launch(folder, tmp_path).status == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "it").rglob("*")}
    other = compile_folder(
        tmp_path / "other", PADDED, model=str(small), max_steps=3, save_steps=1, **SETTINGS | {"learning_rate": 1e-4}
    )
    for out, arguments, sentence in (
        (folder, (), "it holds checkpoint-1, checkpoint-2, final of an earlier run: go on from there with `--resume`"),
        (folder, ("--resume",), "this run is finished, it/final is its result after 2 steps"),
        (other, ("--resume",), "it/final belongs to another run: learning rate was [0.0003"),
    ):
        outcome = launch(out, tmp_path, *arguments)
        assert outcome.status != 0
        said = [line for line in outcome.text.splitlines() if line.startswith("train.py: ")]
        assert len(said) == 1, outcome.text[-4000:]
        assert said[0].startswith(f"train.py: {sentence}")
        assert not outcome.losses
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "it").rglob("*")} == before


@pytest.mark.parametrize("shared", [True, False])
def test_checkpoints_of_two_nodes_need_one_folder(tmp_path: Path, small: Path, shared: bool) -> None:
    """The first process decides for all; where a node does not see what it wrote, nobody trains."""
    config = replace(PADDED, engine=Engine.DDP, nodes=2, gpus_per_node=1, gradient_accumulation_steps=1)
    places = [tmp_path / name for name in (("one", "one") if shared else ("one", "two"))]
    for place in set(places):
        place.mkdir()
        write_rows(place / "rows.jsonl", "chat", count=8, distinct=2)
    folder = compile_folder(tmp_path / "out", config, model=str(small), max_steps=1, save_steps=1, **SETTINGS)
    script = folder / "train.py"
    script.write_text(script.read_text().replace("SHARED_WAIT_SECONDS = 15", "SHARED_WAIT_SECONDS = 2"))
    outcomes = launch_nodes(folder, places, nodes=2)
    if shared:
        assert [outcome.status for outcome in outcomes] == [0, 0], outcomes[0].text[-4000:]
        outcomes = launch_nodes(folder, places, "--resume", "--max-steps", "2", nodes=2)
        assert [outcome.status for outcome in outcomes] == [0, 0], outcomes[0].text[-4000:]
        assert "going on from it/checkpoint-1" in outcomes[0].text
        assert len(outcomes[0].losses) == 1
        return
    assert all(outcome.status != 0 for outcome in outcomes)
    said = [line for outcome in outcomes for line in outcome.text.splitlines() if line.startswith("train.py: ")]
    assert len(said) == 1, outcomes[0].text[-4000:]
    assert "process 1 on " in said[0]
    assert "all nodes must share the folder of checkpoints" in said[0]
    assert not any(outcome.losses for outcome in outcomes)


def _wait_for(happened: Callable[[], object], timeout_seconds: float = 900) -> None:
    end = time.monotonic() + timeout_seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def _ranks(folder: Path) -> list[int]:
    """Returns the living processes that run a folder's train.py themselves, not those that launch it."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(folder / "train.py") in command and "launch" not in command:
            found.append(int(place.parent.name))
    return sorted(found)
