"""Commands run in the process of the tests, and the small spec that they run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from memc.cli import main

SMALL = """\
model: HuggingFaceTB/SmolLM2-135M-Instruct
data: {train: data/train.jsonl, max_length: 256, samples: 175, mean_tokens: 120}
method: lora
training: {epochs: 1, global_batch_size: 8}
hardware: {gpu: t4, count: 1, host_memory: 16GiB}
"""


class Ended(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def command_runner(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Returns a function that runs memc with the arguments it is given."""

    def run(*arguments: str) -> Ended:
        try:
            main(arguments)
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run
