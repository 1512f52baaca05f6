"""Compiles and runs a folder in end-to-end tests; the one place that knows how a folder is made."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memc.config import TrainingConfig
from memc.render import render
from planmaker import make_plan, make_run
from torch_extensions import framework_environment

DATA = Path(__file__).resolve().parents[2] / "examples" / "data" / "self-instruct-seed.jsonl"


def render_folder(out: Path, config: TrainingConfig, **run: Any) -> Path:
    """Returns `out`, rendered from a plan made by hand: for what `memc compile` would refuse."""
    out.mkdir(parents=True)
    plan = make_plan(config, make_run(**run))
    for name, text in render(plan, spec_name="smollm2.yaml", command="memc compile smollm2.yaml").items():
        (out / name).write_text(text, encoding="utf-8")
    return out


@dataclass(frozen=True)
class Outcome:
    """How one run of launch.sh ended."""

    status: int
    text: str

    @property
    def losses(self) -> list[float]:
        """Training losses in the order of the log."""
        logs = [ast.literal_eval(line) for line in re.findall(r"\{'loss': [^}]*\}", self.text)]
        return [float(log["loss"]) for log in logs]

    @property
    def logs(self) -> list[dict[str, Any]]:
        """All training log lines."""
        return [ast.literal_eval(line) for line in re.findall(r"\{'loss': [^}]*\}", self.text)]


def launch_nodes(folder: Path, starts: Path | list[Path], *arguments: str, nodes: int) -> list[Outcome]:
    """Returns how `launch.sh --device cpu` ended on each of several nodes, all of them this machine.

    Each is started from a folder of its own where there is a list of them.
    """
    places = starts if isinstance(starts, list) else [starts] * nodes
    for place in places:
        place.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MAIN_PROCESS_IP": "127.0.0.1", "MAIN_PROCESS_PORT": str(port)}
    running = [
        subprocess.Popen(
            ["bash", str(folder / "launch.sh"), "--device", "cpu", *arguments],
            cwd=places[rank],
            env=framework_environment() | meeting | {"MACHINE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(nodes)
    ]
    try:
        texts = [process.communicate(timeout=1200)[0] for process in running]
    finally:
        for process in running:
            process.terminate()
    return [Outcome(status=process.returncode, text=text) for process, text in zip(running, texts, strict=True)]


def launch(
    folder: Path, start: Path, *arguments: str, timeout_seconds: int = 1200, file_kib: int | None = None
) -> Outcome:
    """Returns how `launch.sh --device cpu` ended, started from the folder `start`.

    With `file_kib`, no file can become larger: what a full disk does, at a known place.

    Warnings of the libraries are theirs; the run is judged by its status and by what it wrote.
    """
    start.mkdir(exist_ok=True)
    limit = "" if file_kib is None else f"ulimit -f {file_kib}; "
    with subprocess.Popen(
        ["bash", "-c", limit + 'exec bash "$@"', "bash", str(folder / "launch.sh"), "--device", "cpu", *arguments],
        cwd=start,
        env=framework_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            text, _ = process.communicate()
            raise AssertionError(f"not done after {timeout_seconds} s:\n{text[-4000:]}") from None
    with (start / "launch.log").open("a", encoding="utf-8") as log:
        log.write(text)
    return Outcome(status=process.returncode, text=text)


def inspect_model(program: str, *arguments: str) -> Any:
    """Returns the JSON that a short program prints on its last line, run where torch may be imported."""
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env=framework_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return json.loads(outcome.stdout.strip().splitlines()[-1])
