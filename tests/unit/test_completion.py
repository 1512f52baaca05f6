"""Completion: each shell's script, and what the protocol behind it answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from memc.facts import gpu_keys, model_keys

MEMC = (sys.executable, "-m", "memc")


def completed(words: str) -> list[str]:
    """Returns what bash would be offered after `words` (the last one is being typed)."""
    environment = {**os.environ, "_MEMC_COMPLETE": "bash_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run([*MEMC], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return [line.split(",", 1)[1] for line in done.stdout.splitlines() if "," in line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    script = subprocess.run([*MEMC, "completion", shell], capture_output=True, text=True, check=True).stdout
    assert "_MEMC_COMPLETE" in script
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_commands_and_options_are_completed() -> None:
    assert {"compile", "completion"} <= set(completed("memc comp"))
    assert {"--symptom", "--spec"} <= set(completed("memc diagnose --s"))


def test_gpu_and_model_keys_are_completed() -> None:
    assert completed("memc gpus rtx-40") == [key for key in gpu_keys() if key.startswith("rtx-40")]
    assert completed("memc models qwen/qwen2.5-7b") == [k for k in model_keys() if k.startswith("Qwen/Qwen2.5-7B")]
    assert "rtx-4090" in completed("memc init --gpu rtx-409")
    assert completed("memc diagnose --symptom l") == ["long-sample", "list"]


def test_files_are_left_to_the_shell() -> None:
    environment = {**os.environ, "_MEMC_COMPLETE": "bash_complete", "COMP_WORDS": "memc explain sp", "COMP_CWORD": "2"}
    done = subprocess.run([*MEMC], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("file,sp")
