"""How long `memc check` takes on a repository of many specs.

Compiles that many different specs into a folder of its own each, then checks the tree alternately current and after a
change of every spec. Processor time stands beside wall-clock time, which a busy machine stretches. What is printed last
is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memc.cli import main as memc_main

MODELS = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "google/gemma-2-2b-it",
    "microsoft/Phi-4-mini-instruct",
)
CARDS = ("rtx-4090", "l4", "a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-3090")
COUNTS = (1, 2, 8)
LENGTHS = (1024, 2048, 4096)
METHODS = ("lora", "qlora", "full")
LIMIT_SECONDS = 10.0
SPEC = """\
model: {model}
data: {{train: train.jsonl, max_length: {length}, samples: 10000, mean_tokens: 400}}
method: {method}
training: {{epochs: 3, global_batch_size: 16, learning_rate: 1e-4}}
hardware: {{gpu: {card}, count: {count}, host_memory: 128GiB}}
"""


def write_specs(root: Path, wanted: int) -> int:
    """Compiles up to `wanted` different specs that fit, each into `root`/<number>/out; returns how many."""
    written = 0
    choices = list(itertools.product(COUNTS, LENGTHS, METHODS, CARDS, MODELS))
    stride = 37  # visits models, cards, methods, lengths and counts evenly: it divides no product of their numbers
    for step in range(len(choices)):
        if written == wanted:
            break
        count, length, method, card, model = choices[step * stride % len(choices)]
        folder = root / f"{written:03d}"
        folder.mkdir(exist_ok=True)
        spec = folder / "spec.yaml"
        spec.write_text(SPEC.format(model=model, length=length, method=method, card=card, count=count))
        if quietly(["compile", str(spec), "--no-certify"]) == 0:
            written += 1
    return written


def quietly(arguments: list[str]) -> int:
    """Returns the exit status of one memc command in this process; what it prints is dropped."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            memc_main(arguments)
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def checked_seconds(root: Path, expected: int) -> tuple[float, float]:
    """Returns wall-clock and processor seconds of `memc check` on the tree, as a process of its own.

    Raises:
        RuntimeError: When it exits with anything but `expected`.
    """
    command = [str(Path(sys.executable).with_name("memc")), "check", "--json", str(root)]
    start, used = time.perf_counter(), os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - start, os.times()
    processor = after.children_user + after.children_system - used.children_user - used.children_system
    if done.returncode != expected:
        raise RuntimeError(f"{command} exited {done.returncode}, not {expected}:\n{done.stderr}{done.stdout[:2000]}")
    return seconds, processor


def measure(wanted: int, runs: int) -> dict[str, float | int | str | bool]:
    """Returns medians over `runs` checks of a tree that is current and of one in which every spec has changed."""
    current: list[tuple[float, float]] = []
    stale: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="memc-bench-") as scratch:
        root = Path(scratch)
        specs = write_specs(root, wanted)
        texts = {path: path.read_text() for path in sorted(root.glob("*/spec.yaml"))}
        for _ in range(runs):
            for path, text in texts.items():
                path.write_text(text)
            current.append(checked_seconds(root, 0))
            for path, text in texts.items():
                path.write_text(text.replace("epochs: 3", "epochs: 2"))
            stale.append(checked_seconds(root, 4))
    current_wall, current_cpu = (statistics.median(column) for column in zip(*current, strict=True))
    stale_wall, stale_cpu = (statistics.median(column) for column in zip(*stale, strict=True))
    return {
        "schema": "memc/bench-check/1",
        "specs": specs,
        "runs": runs,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "current_seconds": round(current_wall, 3),
        "stale_seconds": round(stale_wall, 3),
        "current_processor_seconds": round(current_cpu, 3),
        "stale_processor_seconds": round(stale_cpu, 3),
        "limit_seconds": LIMIT_SECONDS,
        "within_limit": max(current_wall, stale_wall) < LIMIT_SECONDS,
    }


def main() -> None:
    """Prints the medians for people, then the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--specs", type=int, default=200, help="how many specs (default: 200)")
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (default: 3)")
    options = parser.parse_args()
    result = measure(options.specs, options.runs)
    print(f"memc check of {result['specs']} specs on {result['cores']} cores: {result['current_seconds']} s current,")
    print(f"{result['stale_seconds']} s with every spec changed (limit: {result['limit_seconds']} s);")
    print(f"processor time {result['current_processor_seconds']} s and {result['stale_processor_seconds']} s")
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
