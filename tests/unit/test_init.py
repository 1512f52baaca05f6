"""A first spec: from options, from a dialogue on a real terminal, from what the driver says."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memc.cli import main
from memc.machine import host_memory_bytes
from memc.schema import modeline
from memc.spec import Section, Spec, load_spec, parse_spec
from memc.starter import answer_value, starter_text, yaml_text

MEMC = (sys.executable, "-m", "memc")
ENOUGH = ("--model", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "rtx-4090", "--no-detect")
FAKE_DRIVER = r"""
#include <string.h>
#include <stddef.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, NAME, length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 85899345920ul; return 0; }
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    try:
        main(["init", *arguments])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


def test_options_become_a_commented_spec(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = init(
        capsys, *ENOUGH, "--method", "full,lora", "--count", "2", "--max-length", "4096", "--packing", "true",
        "--memory", "20GiB", "--budget", "$40", "--learning-rate", "1e-5", "--rank", "16", "--host-memory", "64GiB",
        "--task", "sft", "--data", "data/a.jsonl",
    )  # fmt: skip
    assert code == 0
    text = Path("spec.yaml").read_text(encoding="utf-8")
    assert text.splitlines()[0] == modeline()
    spec = load_spec(Path("spec.yaml")).spec
    assert spec.methods == ("full", "lora")
    assert (spec.hardware.count, spec.data.max_length, spec.data.packing, spec.lora.rank) == (2, 4096, True, 16)
    assert (spec.training.learning_rate, spec.memory.target.text, spec.time.budget.usd) == (1e-5, "20GiB", 40)
    assert "memc compile spec.yaml" in err
    assert "memc explain spec.yaml" in err


def test_every_field_that_is_written_has_its_sentence() -> None:
    text = starter_text({"model": "m", "data.max_length": 1, "hardware.gpu": "g", "pin.zero_stage": 2})
    for name, info in Spec.model_fields.items():
        assert f"# {info.description}" in text
        section = info.annotation
        if (
            isinstance(section, type)
            and issubclass(section, Section)
            and name not in ("launch", "lora", "dpo", "ladder", "pin", "libraries")
        ):
            for field, inner in section.model_fields.items():
                assert f"{field}: " in text
                assert f"  # {inner.description}" in text
    assert "  zero_stage: 2  # DeepSpeed ZeRO stage, 0 to 3." in text


def test_every_default_shown_is_the_default() -> None:
    """With every comment sign of a field taken away the spec means the same."""
    text = starter_text({"model": "m", "data.train": "t", "data.max_length": 1, "hardware.gpu": "g"})
    uncommented = re.sub(r"^( *)# (?=[a-z_]+:( |$))", r"\1", text, flags=re.MULTILINE)
    assert "\ntraining:\n  epochs: 3" in uncommented
    again = parse_spec(uncommented, "spec.yaml").spec
    assert again.digest() == parse_spec(text, "spec.yaml").spec.digest()


def test_a_file_is_never_overwritten_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("spec.yaml").write_text("mine\n", encoding="utf-8")
    code, err = init(capsys, *ENOUGH)
    assert code == 2
    assert "error[would-overwrite]" in err
    assert Path("spec.yaml").read_text(encoding="utf-8") == "mine\n"
    assert init(capsys, *ENOUGH, "--force")[0] == 0
    assert load_spec(Path("spec.yaml"))
    Path("folder.yaml").mkdir()
    assert init(capsys, "folder.yaml", *ENOUGH, "--force")[0] == 2


def test_wrong_options_are_all_told_and_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = init(capsys, "--model", "Qwen/Qwen2.5-7B-Instrct", "--gpu", "rtx-4091", "--max-length", "12k",
                     "--method", "lorra")  # fmt: skip
    assert code == 2
    for part in ("data.max_length", "did you mean lora?", "nearest in the catalogue: Qwen/Qwen2.5-7B-I", "rtx-4090"):
        assert part in err
    assert not Path("spec.yaml").exists()


def test_without_a_terminal_nothing_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = init(capsys, "--no-detect")
    assert code == 2
    assert "--model and --gpu are not given" in err


HOSTILE = ["yes: no", "# x", "'", '"', "a\nb", "{x}", "[1]", "&a", "*a", "!!python/object:os.system", "- a", "null",
           "1e3", "0x10", "~", "@x", "%x", "a: b # c", "${HOME}", "模型", "a\u2028b", "😀",
           "true", " lead", "\\", "|"]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_stay_values(value: str) -> None:
    values = {"model": value, "data.train": value, "data.max_length": 1, "hardware.gpu": value}
    spec = parse_spec(starter_text(values), "spec.yaml").spec
    assert (spec.model, spec.data.train, spec.hardware.gpu) == (value, value, value)


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"), include_characters="\n\t"), min_size=1).filter(str.strip))
@settings(max_examples=200, deadline=None)
def test_any_text_reads_back(value: str) -> None:
    values = {"model": value, "data.train": "t", "data.max_length": 1, "hardware.gpu": "g"}
    assert parse_spec(starter_text(values), "spec.yaml").spec.model == value


def test_answers_mean_what_a_spec_means() -> None:
    assert answer_value("model", "123") == "123"
    assert answer_value("data.max_length", "4096") == 4096
    assert answer_value("method", "[full, lora]") == ["full", "lora"]
    assert yaml_text([True, 1.5, "a b"]) == '[true, 1.5, "a b"]'


def converse(arguments: tuple[str, ...], answers: list[str]) -> tuple[int, str]:
    """Returns exit code and all that a terminal showed, with one answer typed at each prompt."""
    master, slave = pty.openpty()
    environment = {**os.environ, "LD_LIBRARY_PATH": "", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [*MEMC, "init", *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True
    )
    os.close(slave)
    shown, waiting, deadline = "", list(answers), time.monotonic() + 60
    while time.monotonic() < deadline:
        ready, _, _ = select.select([master], [], [], 0.2)
        if ready:
            try:
                piece = os.read(master, 4096).decode("utf-8", "replace")
            except OSError:
                break
            shown += piece
            if waiting and shown.endswith(": "):
                os.write(master, (waiting.pop(0) + "\n").encode())
        elif process.poll() is not None:
            break
    code = process.wait(timeout=30)
    os.close(master)
    return code, shown


def test_a_dialogue_checks_each_answer_at_once() -> None:
    code, shown = converse(
        ("--no-detect",),
        ["Qwen/Qwen2.5-7B-Instrct", "Qwen/Qwen2.5-7B-Instruct", "", "", "12k", "4096", "lorra", "lora", "rtx-4091",
         "rtx-4090", "", "64GiB", "22", "22GiB", "24h"],
    )  # fmt: skip
    assert code == 0, shown
    for part in ("nearest in the catalogue", "must be a whole number", "did you mean lora?", "a size needs a unit"):
        assert part in shown
    spec = load_spec(Path("spec.yaml")).spec
    assert (spec.data.max_length, spec.methods, spec.hardware.gpu) == (4096, ("lora",), "rtx-4090")
    assert spec.memory.target is not None
    assert spec.memory.target.text == "22GiB"


@pytest.mark.parametrize(("name", "key"), [("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("NVIDIA Secret 9000", "")])
def test_the_local_gpu_is_found_through_the_driver(name: str, key: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build a stand-in for the driver")
    (tmp_path / "driver.c").write_text(FAKE_DRIVER, encoding="utf-8")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", f'-DNAME="{name}"', "-o", str(library), str(tmp_path / "driver.c")], check=True
    )
    done = subprocess.run(
        [*MEMC, "init", "--model", "Qwen/Qwen2.5-7B-Instruct"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if not key:
        assert done.returncode == 2
        assert "2 x NVIDIA Secret 9000, which the catalogue does not know" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    hardware = load_spec(Path("spec.yaml")).spec.hardware
    assert (hardware.gpu, hardware.count) == (key, 2)
    assert hardware.host_memory is not None
    assert hardware.host_memory.bytes <= (host_memory_bytes() or 0)


def test_host_memory_is_read_from_the_system(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       65536000 kB\nMemFree: 1 kB\n", encoding="utf-8")
    assert host_memory_bytes(tmp_path / "meminfo") == 65536000 * 1024
    (tmp_path / "other").write_text("nothing\n", encoding="utf-8")
    assert host_memory_bytes(tmp_path / "other") is None
    assert host_memory_bytes(tmp_path / "missing") is None
