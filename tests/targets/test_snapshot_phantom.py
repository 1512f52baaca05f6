"""Snapshots as torch's own allocator writes them, on a phantom card: the peak and a failure, by account."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from memc.diagnose import attribution
from memc.errors import MemcError
from memc.rehearse.build import phantom
from memc.rehearse.toolchain import find_toolchain

MIB = 1 << 20
CARD = f"1|{1 << 30}|{64 * MIB}|8|9|128|Card of one"

PROGRAM = """
import json, sys, torch
torch.cuda.memory._record_memory_history({history})

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2048, 2048, bias=False, device="cuda")

    def forward(self, rows):
        return [self.inner(rows) for _ in range(8)]

layer = Layer()
stepped = torch.optim.AdamW(layer.parameters(), foreach=False)
layer.inner.weight.grad = torch.empty_like(layer.inner.weight)
stepped.step()
rows = torch.empty(4096, 2048, device="cuda")
kept = layer(rows)
peak = torch.cuda.max_memory_allocated()
failed = False
if {fail}:
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        failed = True
        torch.cuda.memory._dump_snapshot(sys.argv[1])
else:
    del kept, rows
    torch.cuda.memory._dump_snapshot(sys.argv[1])
print(json.dumps([peak, torch.cuda.memory_allocated(), failed]))
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Returns the environment of a process that sees the phantom card."""
    try:
        built = phantom(find_toolchain())
    except MemcError as error:
        pytest.skip(f"needs the CUDA build of torch: {error.diagnostics[0].message}")
    loader = built.environment(os.environ.get("LD_LIBRARY_PATH", ""))
    return {**os.environ, **loader, "MEMC_PHANTOM": CARD, "CUDA_VISIBLE_DEVICES": "0"}


def ran(environment: dict[str, str], place: Path, *, history: str, fail: bool) -> list[Any]:
    program = PROGRAM.replace("{history}", history).replace("{fail}", str(fail))
    command = [sys.executable, "-W", "ignore", "-c", program, str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_history_is_undone_to_the_peak_that_torch_counts(environment: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "rank0.pickle"
    peak, at_end, _ = ran(environment, place, history='stacks="python"', fail=False)
    found = attribution(place.read_bytes())
    assert found.moment == "peak"
    assert found.allocated_bytes == pytest.approx(peak, rel=0.001)
    assert found.allocated_bytes > at_end + 200 * MIB, "what was freed since is found again"
    assert found.accounts["parameters"] == 16 * MIB
    assert found.accounts["optimizer_states"] == pytest.approx(32 * MIB, abs=4096)
    assert found.accounts["activations"] >= 256 * MIB


def test_a_failure_without_history_tells_what_was_in_use(environment: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "rank0.pickle"
    state = '"state", context="state", stacks="python"'
    _, at_end, failed = ran(environment, place, history=state, fail=True)
    assert failed
    found = attribution(place.read_bytes())
    assert found.allocated_bytes == pytest.approx(at_end, rel=0.001)
    assert found.accounts["parameters"] == 16 * MIB
    assert found.accounts["activations"] >= 256 * MIB
    assert any("forward" in frame for frame in found.frames)
