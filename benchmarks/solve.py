"""The whole space of a 70B on 64 GPUs: how many configurations memc decides, and how long a cold compile takes.

Other estimators answer in the same run: `accelerate estimate-memory`, whose request to the hub is replaced by the same
model's configuration on disk, and the package ftuneai, which prices one configuration at a time. Each is a process of
its own, started alternately with the others so that a slow moment of the machine hits all. What is compared, and held
to the limit, is the best of several cold starts of each, which other work of the machine delays least; the median of
the compile stands beside. The last line printed is one JSON object.

The compile is that of the closed forms, without the trace that certifies the chosen plan where the stack is installed:
that runs one plan through the modelling code and takes seconds.

A configuration counts as considered once it is decided: priced, or ruled out by a lower bound of its memory, or by a
smaller micro-batch that does not fit, or because what stands on a lower rung of the ladder suffices.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPEC = Path(__file__).with_name("70b-on-64-gpus.yaml")
LIMIT_SECONDS = 0.5
LEAST_CONFIGURATIONS = 10_000

# Counted inside one process, imports left out: the first solve, with nothing cached.
SOLVE = """
import json, sys, time
from pathlib import Path
from memc import driver
from memc.solver import solve
from memc.spec import load_spec
loaded = load_spec(Path(sys.argv[1]))
gpu, model = driver.facts_of(loaded)
start = time.perf_counter()
plan = solve(loaded, model, gpu, loaded.spec.data.samples)
print(json.dumps({"seconds": time.perf_counter() - start, "considered": plan.considered, "rung": plan.rung}))
"""
ACCELERATE = """
import sys
from types import SimpleNamespace
from accelerate.commands import estimate
estimate.verify_on_hub = lambda *_args, **_kwargs: SimpleNamespace(library_name="transformers", config={})
parser = estimate.estimate_command_parser()
estimate.estimate_command(parser.parse_args([sys.argv[1], "--library_name", "transformers", "--dtypes", "float16"]))
"""
FTUNE_SETTINGS = """
import itertools
SETTINGS = list(itertools.product(
    ({"method": "full"}, {"method": "lora"}, {"method": "qlora", "quantization": "4bit"}),
    ("none", "zero_1", "zero_2", "zero_3", "fsdp"), (1, 2, 4, 8, 16), (False, True), ("adamw", "adam_8bit"),
))
"""
FTUNE = f"""
import json, sys, time
{FTUNE_SETTINGS}
from ftuneai import Estimator
start = time.perf_counter()
for method, sharding, batch, checkpoints, optimizer in SETTINGS:
    Estimator(sys.argv[1], **method, sharding=sharding, batch_size=batch, gradient_checkpointing=checkpoints,
              optimizer=optimizer, seq_length=4096, num_gpus=64).estimate_memory()
print(json.dumps({{"seconds": time.perf_counter() - start, "priced": len(SETTINGS)}}))
"""


@dataclass(frozen=True)
class Run:
    """One process: wall-clock seconds, processor seconds, largest resident memory, what it printed last."""

    seconds: float
    processor_seconds: float
    peak_rss_bytes: int
    last_line: str


def run(command: list[str]) -> Run:
    """Returns what one process took.

    Raises:
        RuntimeError: When it exits with anything but 0.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode != 0:
        raise RuntimeError(f"{command} exited {process.returncode}:\n{text[-3000:]}")
    kilobytes = usage.ru_maxrss if sys.platform != "darwin" else usage.ru_maxrss // 1024
    return Run(seconds, usage.ru_utime + usage.ru_stime, kilobytes * 1024, (text.strip().splitlines() or [""])[-1])


def commands(scratch: Path) -> dict[str, list[str]]:
    """Returns what is run, by name; estimators that are not installed are left out."""
    model = scratch / "model"
    model.mkdir()
    (model / "config.json").write_text(model_config(), encoding="utf-8")
    memc = str(Path(sys.executable).with_name("memc"))
    found = {
        "compile": [memc, "compile", "--no-certify", str(SPEC), "-o", str(scratch / "out")],
        "solve": [sys.executable, "-c", SOLVE, str(SPEC)],
    }
    if all(importlib.util.find_spec(name) for name in ("accelerate", "torch", "transformers")):
        found["accelerate"] = [sys.executable, "-c", ACCELERATE, str(model)]
    if importlib.util.find_spec("ftuneai"):
        found["ftuneai"] = [sys.executable, "-c", FTUNE, model_name()]
    return found


def model_name() -> str:
    """Returns the name of the model that the spec compiles."""
    from memc.spec import load_spec

    return load_spec(SPEC).spec.model


def model_config() -> str:
    """Returns the model's config.json, as the catalogue has it."""
    import yaml
    from memc.resources import specs_root

    name = model_name().replace("/", "--")
    record = yaml.safe_load(specs_root().joinpath("models", f"{name}.yaml").read_text(encoding="utf-8"))
    return json.dumps(record["config"])


def measure(runs: int) -> dict[str, Any]:
    """Returns the best and the median over alternating runs; one run of each goes before and is not counted.

    The uncounted run fills the page cache and writes byte code. Each compile writes a folder that is not there yet.
    """
    with tempfile.TemporaryDirectory(prefix="memc-bench-") as scratch:
        asked = commands(Path(scratch))
        times: dict[str, list[Run]] = {name: [] for name in asked}
        for number in range(runs + 1):
            for name, command in asked.items():
                own = [*command[:-1], f"{scratch}/{number}"] if name == "compile" else command
                done = run(own)
                if number:
                    times[name].append(done)
    compile_seconds = min(done.seconds for done in times["compile"])
    solved = [json.loads(done.last_line) for done in times["solve"]]
    solve_seconds = min(item["seconds"] for item in solved)
    considered = solved[0]["considered"]
    result: dict[str, Any] = {
        "schema": "memc/bench-solve/1",
        "spec": SPEC.name,
        "runs": runs,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "configurations": considered,
        "solve_seconds": round(solve_seconds, 4),
        "configurations_per_second": round(considered / solve_seconds),
        "compile_seconds": round(compile_seconds, 4),
        "compile_median_seconds": round(statistics.median(done.seconds for done in times["compile"]), 4),
        "compile_processor_seconds": round(min(done.processor_seconds for done in times["compile"]), 4),
        "peak_rss_mib": round(max(done.peak_rss_bytes for done in times["compile"]) / 2**20, 1),
        "within_limit": compile_seconds < LIMIT_SECONDS and considered >= LEAST_CONFIGURATIONS,
    }
    for name in ("accelerate", "ftuneai"):
        seconds = min(done.seconds for done in times[name]) if times.get(name) else None
        result[f"{name}_seconds"] = None if seconds is None else round(seconds, 4)
        result[f"speedup_vs_{name}"] = None if seconds is None else round(seconds / compile_seconds, 2)
    result["accelerate_peak_rss_mib"] = (
        round(max(done.peak_rss_bytes for done in times["accelerate"]) / 2**20, 1) if "accelerate" in times else None
    )
    result |= _ftune_rate(times.get("ftuneai", []), considered / solve_seconds)
    return result


def _ftune_rate(runs: list[Run], memc_rate: float) -> dict[str, Any]:
    """Returns how many configurations a second the other estimator prices, imports left out, and memc's over that."""
    if not runs:
        return {"ftuneai_configurations_per_second": None, "rate_vs_ftuneai": None}
    priced = [json.loads(done.last_line) for done in runs]
    rate = max(item["priced"] / item["seconds"] for item in priced)
    return {"ftuneai_configurations_per_second": round(rate), "rate_vs_ftuneai": round(memc_rate / rate, 2)}


def main() -> None:
    """Prints the figures for people, then the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each (default: 5)")
    result = measure(parser.parse_args().runs)
    print(
        f"memc decides {result['configurations']:,} configurations of {result['spec']} in {result['solve_seconds']} s "
        f"({result['configurations_per_second']:,} a second)"
    )
    print(
        f"memc compile, cold: {result['compile_seconds']} s (best of {result['runs']}, median "
        f"{result['compile_median_seconds']} s; limit {LIMIT_SECONDS} s), {result['peak_rss_mib']} MiB"
    )
    for name, what in (
        ("accelerate", "accelerate estimate-memory, one data type of the same model, no files"),
        ("ftuneai", "ftuneai, 300 configurations of the same model, no choice and no files"),
    ):
        seconds, ratio = result[f"{name}_seconds"], result[f"speedup_vs_{name}"]
        print(f"{what}: " + ("not installed" if seconds is None else f"{seconds} s, {ratio} x as long as memc"))
    if result["rate_vs_ftuneai"] is not None:
        rate = result["ftuneai_configurations_per_second"]
        print(f"configurations a second, imports left out: {rate:,} there, {result['rate_vs_ftuneai']} x as many here")
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
