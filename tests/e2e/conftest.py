"""The models that end-to-end tests train: SmolLM2-135M-Instruct with its real weights, whole and cut."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loader import Loader
from torch_extensions import framework_environment

_HERE = Path(__file__).resolve().parent
_MODELS = _HERE.parents[1] / "build" / "models"
sys.path.append(str(_HERE.parent / "targets"))  # the matrix of configurations


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Returns a folder with config, tokenizer and safetensors of the whole model."""
    return _written("SmolLM2 135M Instruct", "write_smollm2(folder)")


@pytest.fixture(scope="session")
def small() -> Path:
    """Returns a folder with a cut SmolLM2: four layers and 8192 tokens, a start of seconds."""
    return _written("SmolLM2 cut", "write_small(folder, rows)")


@pytest.fixture(scope="session")
def loader() -> Iterator[Loader]:
    """Returns the process that loads what runs have written."""
    found = Loader()
    yield found
    found.close()


def _written(name: str, call: str) -> Path:
    """Returns a model's folder below build/, made by a process of its own unless this version of it is there."""
    version = hashlib.sha256((_HERE / "smollm2.py").read_bytes()).hexdigest()[:12]
    folder = _MODELS / version / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            partial = folder.with_name(name + " partial")
            program = "import sys, pathlib; from smollm2 import *; folder, rows = map(pathlib.Path, sys.argv[1:]); "
            rows = _HERE.parents[1] / "examples" / "data" / "self-instruct-seed.jsonl"
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program + call, str(partial), str(rows)],
                cwd=_HERE, env=framework_environment(), timeout=900, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
            partial.rename(folder)
    return folder
