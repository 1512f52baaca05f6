"""The model that end-to-end tests train: SmolLM2-135M-Instruct with its real weights, converted once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch_extensions import framework_environment


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with config, tokenizer and safetensors. Written by a process of its own, to keep torch out."""
    folder = tmp_path_factory.mktemp("model") / "SmolLM2 135M Instruct"
    program = "import sys, pathlib; from smollm2 import write_smollm2; write_smollm2(pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        check=True,
        cwd=Path(__file__).parent,
        env=framework_environment(),
        timeout=900,
        capture_output=True,
    )
    return folder
