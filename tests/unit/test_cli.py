"""The command line: exit codes, what goes to which stream, and what a newcomer sees when something is wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from memc import cli, commands, driver
from memc.cli import main

SMALL = """\
model: HuggingFaceTB/SmolLM2-135M-Instruct
data: {train: data/train.jsonl, max_length: 256, samples: 175, mean_tokens: 120}
method: lora
training: {epochs: 1, global_batch_size: 8}
hardware: {gpu: t4, count: 1, host_memory: 16GiB}
"""
INFEASIBLE = """\
model: Qwen/Qwen2.5-7B-Instruct
data: {train: data/train.jsonl, max_length: 4096, samples: 10000, mean_tokens: 900}
method: full
hardware: {gpu: rtx-4090, count: 1, host_memory: 64GiB}
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Shell:
    """Runs commands in this process, in a folder of its own."""

    def __init__(self, capture: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capture = capture
        self.folder = folder

    def __call__(self, *arguments: str) -> Ended:
        try:
            main(arguments)
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = self.capture.readouterr()
        return Ended(code, captured.out, captured.err)

    def write(self, name: str, text: str = SMALL) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def files(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture
def memc(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEMC_TRACEBACK", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return Shell(capsys, tmp_path)


def test_compile_writes_beside_the_spec_and_says_what_it_did_on_standard_error(memc: Shell) -> None:
    memc.write("in/spec.yaml")
    done = memc("compile", "in/spec.yaml")
    assert done.code == 0
    assert done.out.startswith("FITS: ")
    assert [line.split(":")[0] for line in done.out.splitlines()][:4] == ["FITS", "PEAK", "TIME", "PLAN"]
    assert "created: in/out/train.py" in done.err
    assert {"in/out/train.py", "in/out/memc.lock", "in/out/PLAN.md"} <= memc.files()
    assert memc("compile", "in/spec.yaml").err == "current: in/out\n"


def test_check_writes_nothing_and_exits_4_until_the_folder_is_current(memc: Shell) -> None:
    memc.write("spec.yaml")
    missing = memc("compile", "spec.yaml", "--check")
    assert missing.code == 4
    assert missing.out == ""
    assert "error[stale]: train.py is not what the spec yields (create)" in missing.err
    assert memc.files() == {"spec.yaml"}
    memc("compile", "spec.yaml")
    current = memc("compile", "spec.yaml", "--check")
    assert (current.code, current.out, current.err) == (0, "", "current: out\n")
    (memc.folder / "out" / "train.py").write_text("mine", encoding="utf-8")
    edited = memc("compile", "spec.yaml", "--check")
    assert edited.code == 4
    assert "edited by hand" in edited.err
    assert (memc.folder / "out" / "train.py").read_text(encoding="utf-8") == "mine"
    memc.write("spec.yaml", SMALL.replace("epochs: 1", "epochs: 2"))
    assert memc("compile", "spec.yaml", "--check").code == 4


def test_a_hand_edited_file_exits_4_and_force_overwrites_it(memc: Shell) -> None:
    memc.write("spec.yaml")
    memc("compile", "spec.yaml")
    (memc.folder / "out" / "launch.sh").write_text("mine", encoding="utf-8")
    refused = memc("compile", "spec.yaml")
    assert (refused.code, refused.out) == (4, "")
    assert "error[would-overwrite]: launch.sh was edited by hand" in refused.err
    forced = memc("compile", "spec.yaml", "--force")
    assert forced.code == 0
    assert "overwritten: out/launch.sh" in forced.err


def test_a_left_over_file_is_named(memc: Shell) -> None:
    memc.write("spec.yaml", SMALL + "pin: {engine: deepspeed}\n")
    memc("compile", "spec.yaml")
    memc.write("spec.yaml")
    done = memc("compile", "spec.yaml")
    assert done.code == 0
    assert "left over: out/ds_config.json" in done.err
    assert memc("compile", "spec.yaml", "--check").code == 4


def test_a_refusal_exits_3_reports_and_writes_nothing(memc: Shell) -> None:
    memc.write("big.yaml", INFEASIBLE)
    done = memc("compile", "big.yaml")
    assert done.code == 3
    assert done.out.startswith("DOES NOT FIT: Qwen/Qwen2.5-7B-Instruct on 1 x NVIDIA GeForce RTX 4090")
    assert done.err == "nothing written: big.yaml does not fit\n"
    assert memc.files() == {"big.yaml"}
    shown = memc("explain", "big.yaml")
    assert (shown.code, shown.out, shown.err) == (3, done.out, "")
    assert memc("explain", "big.yaml", "--json").code == 3


def test_of_several_specs_none_is_written_when_one_does_not_fit(memc: Shell) -> None:
    memc.write("small.yaml")
    memc.write("big.yaml", INFEASIBLE)
    done = memc("compile", "small.yaml", "big.yaml", "-o", "all")
    assert done.code == 3
    assert "DOES NOT FIT" in done.out
    assert "nothing written" in done.err
    assert memc.files() == {"small.yaml", "big.yaml"}


def test_of_several_specs_none_is_written_when_one_is_invalid(memc: Shell) -> None:
    memc.write("small.yaml")
    memc.write("typo.yaml", SMALL.replace("method", "methods"))
    memc.write("card.yaml", SMALL.replace("t4", "t44"))
    done = memc("compile", "small.yaml", "typo.yaml", "card.yaml", "-o", "all")
    assert (done.code, done.out) == (2, "")
    assert "typo.yaml:3:1" in done.err
    assert "card.yaml:5:17" in done.err
    assert memc.files() == {"small.yaml", "typo.yaml", "card.yaml"}


def test_several_specs_get_a_folder_each(memc: Shell) -> None:
    memc.write("a.yaml")
    memc.write("b.yaml", SMALL.replace("256", "512"))
    done = memc("compile", "a.yaml", "b.yaml", "-o", "all", "--json")
    assert done.code == 0
    assert [document["spec"]["name"] for document in json.loads(done.out)] == ["a.yaml", "b.yaml"]
    assert {"all/a/train.py", "all/b/train.py"} <= memc.files()
    memc.write("c/a.yaml")
    assert memc("compile", "a.yaml", "c/a.yaml").code == 0
    assert {"out/train.py", "c/out/train.py"} <= memc.files()


@pytest.mark.parametrize("arguments", [("a.yaml", "c/a.yaml", "-o", "all"), ("a.yaml", "b.yaml"), ("a.yaml", "a.yaml")])
def test_two_specs_in_one_folder_are_refused(memc: Shell, arguments: tuple[str, ...]) -> None:
    for name in ("a.yaml", "b.yaml", "c/a.yaml"):
        memc.write(name)
    done = memc("compile", *arguments)
    assert done.code == 2
    assert "error[same-folder]" in done.err
    assert memc.files() == {"a.yaml", "b.yaml", "c/a.yaml"}


def test_a_file_as_output_folder_is_refused(memc: Shell) -> None:
    memc.write("spec.yaml")
    memc.write("taken", "x")
    done = memc("compile", "spec.yaml", "-o", "taken")
    assert done.code == 2
    assert "error[cannot-write]: taken cannot be written" in done.err


def test_explain_takes_a_spec_or_a_folder(memc: Shell) -> None:
    memc.write("spec.yaml")
    memc("compile", "spec.yaml")
    of_spec, of_folder = memc("explain", "spec.yaml"), memc("explain", "out")
    assert of_spec.code == 0
    assert of_spec.err == ""
    assert of_spec.out == of_folder.out
    for part in ("FITS: ", "memory of one GPU, GiB", "<- peak", "ladder", "time of one optimizer step"):
        assert part in of_spec.out


def test_explain_resolved_prints_every_default(memc: Shell) -> None:
    memc.write("spec.yaml")
    resolved = json.loads(memc("explain", "spec.yaml", "--resolved", "--json").out)
    assert resolved["training"]["warmup_ratio"] == 0.03
    assert resolved["objective"] == "lowest-rung"


def test_json_is_one_document_and_stable(memc: Shell) -> None:
    memc.write("spec.yaml")
    first, second = memc("explain", "spec.yaml", "--json"), memc("explain", "spec.yaml", "--json")
    assert first.out == second.out
    assert first.err == ""
    document = json.loads(first.out)
    assert document["schema"] == "memc/explain/1"
    assert first.out == json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("command", ["gpus", "models"])
def test_catalogues_list_and_show(memc: Shell, command: str) -> None:
    table, rows = memc(command), json.loads(memc(command, "--json").out)
    assert table.code == 0
    assert len(table.out.splitlines()) == len(rows) + 1 > 50
    key = rows[0]["key"]
    assert key in memc(command, key).out
    assert json.loads(memc(command, key, "--json").out)["key"] == key


def test_a_misspelt_name_is_answered_with_the_nearest(memc: Shell) -> None:
    card, model = memc("gpus", "rtx4900"), memc("models", "Qwen/Qwen2.5-7B-Instrct")
    assert (card.code, card.out) == (2, "")
    assert "nearest: rtx-4090" in card.err
    assert (model.code, model.out) == (2, "")
    assert "nearest in the catalogue: Qwen/Qwen2.5-7B-Instruct" in model.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("complie",), "Did you mean 'compile'?"),
        (("compile", "--jsn", "s.yaml"), "Did you mean '--json'?"),
        (("compile",), "Missing argument 'SPECS...'"),
        (("explain", "a", "b"), "Got unexpected extra argument (b)"),
        (("verify", "out", "--device", "tpu"), "'tpu' is not one of 'auto', 'cuda', 'cpu'"),
        (("verify", "out", "--steps", "0"), "not in the range 1<=x<=1000"),
        ((), "Usage: memc"),
        (("explain", "gone.yaml"), "error[spec-not-found]: there is no file gone.yaml"),
        (("explain", "."), "error[no-lock]"),
        (("compile", "."), "error[spec-is-a-folder]"),
    ],
)
def test_wrong_usage_exits_2_with_a_hint_and_prints_no_result(
    memc: Shell, arguments: tuple[str, ...], hint: str
) -> None:
    done = memc(*arguments)
    assert (done.code, done.out) == (2, "")
    assert hint in done.err


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("compile", "-h"), ("verify", "--help"), ("--version",)])
def test_help_and_version_exit_0_on_standard_output(memc: Shell, arguments: tuple[str, ...]) -> None:
    done = memc(*arguments)
    assert done.code == 0
    assert done.out
    assert done.err == ""


def test_help_lists_the_exit_codes(memc: Shell) -> None:
    text = memc("--help").out
    assert all(f"{code} " in text for code in range(6))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), "/tmp/x: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "No usable temporary"),
    ],
)
def test_a_disk_that_is_full_or_forbidden_is_no_error_of_memc_s_own(
    memc: Shell, monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    def refused(path: Path) -> Path:
        raise error

    monkeypatch.setattr(driver, "spec_path_of", refused)
    done = memc("explain", "spec.yaml")
    assert (done.code, done.out) == (2, "")
    first, hint = done.err.splitlines()
    assert first.startswith(f"error[system-refuses]: the system refuses: {said}")
    assert "TMPDIR" in hint


def test_an_unforeseen_error_exits_1_in_one_line_and_says_how_to_see_more(
    memc: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> Path:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr(driver, "spec_path_of", broken)
    done = memc("explain", "spec.yaml")
    assert (done.code, done.out) == (1, "")
    first, hint = done.err.splitlines()
    assert first.startswith("error[internal]: memc ")
    assert first.endswith("RuntimeError: first second")
    assert "MEMC_TRACEBACK=1" in hint
    monkeypatch.setenv("MEMC_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="first"):
        main(("explain", "spec.yaml"))


def test_an_interrupt_exits_130(memc: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "spec_path_of", interrupted)
    done = memc("explain", "spec.yaml")
    assert (done.code, done.out) == (130, "")
    assert "interrupted" in done.err


@pytest.mark.parametrize("columns", ["80", "0", "wide", "-3", ""])
def test_any_width_that_the_environment_names_will_do(
    memc: Shell, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    memc.write("spec.yaml")
    monkeypatch.setenv("COLUMNS", columns)
    done = memc("explain", "spec.yaml")
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= (80 if columns == "80" else 120)


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    command = [sys.executable, "-m", "memc", *arguments]
    return subprocess.run(command, cwd=folder, env=kept | environment, capture_output=True, check=False)


def test_colour_is_off_when_asked_and_in_a_pipe(memc: Shell) -> None:
    memc.write("spec.yaml")
    for environment in ({}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        done = run(["explain", "spec.yaml"], memc.folder, **environment)
        assert done.returncode == 0
        assert b"\x1b" not in done.stdout


def test_a_terminal_without_unicode_gets_escapes_and_no_crash(memc: Shell) -> None:
    memc.write("模型.yaml")
    done = run(["explain", "模型.yaml"], memc.folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    missing = run(["explain", "缺.yaml"], memc.folder, PYTHONIOENCODING="ascii")
    assert missing.returncode == 2
    assert missing.stderr.startswith(b"error[spec-not-found]: there is no file ")


def test_a_reader_that_leaves_early_is_no_error(memc: Shell) -> None:
    script = f"{sys.executable} -m memc models | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], cwd=memc.folder, capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stderr == b""


def test_compiling_and_explaining_load_only_what_they_need(memc: Shell) -> None:
    """The frameworks are never loaded; the report's and the templates' libraries only where they are used."""
    memc.write("spec.yaml")
    heavy = ["torch", "transformers", "peft", "accelerate", "deepspeed", "trl", "bitsandbytes", "datasets", "numpy"]
    for arguments, unwanted in (
        (["compile", "spec.yaml"], heavy),
        (["explain", "spec.yaml"], [*heavy, "jinja2"]),
        (["explain", "spec.yaml", "--json"], [*heavy, "jinja2", "rich"]),
    ):
        script = (
            "import sys\nfrom memc.cli import main\ntry:\n main(sys.argv[1:])\nexcept SystemExit as stop:\n"
            f" assert not stop.code, stop.code\nassert not set(sys.modules) & set({unwanted}), "
            f"set(sys.modules) & set({unwanted})"
        )
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, cwd=memc.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_command_that_answers_has_json() -> None:
    for name, command in cli.app.commands.items():
        assert any("--json" in parameter.opts for parameter in command.params), name
        assert command.help, name


def test_listing_commands_says_of_each_what_its_own_help_says() -> None:
    for name, text in commands.NAMES.items():
        command = import_module(f"memc.commands.{name}").command
        assert command.get_short_help_str(500) == text


def test_listing_commands_loads_neither_the_solver_nor_the_fields_of_a_spec() -> None:
    code = (
        "import sys\nfrom memc.cli import main\ntry:\n main(['--help'])\nexcept SystemExit:\n pass\n"
        "print([name for name in ('pydantic', 'memc.solver', 'memc.ledger') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "compile" in done.stdout
