"""Measures training steps on a card: memory by phase and step time of models with random weights.

Each case runs in a process of its own with a time limit, so that one that fails ends no other; the next processes
already import and build while one runs, and take the card only when it is free. Results are added to a file as they
come, one JSON object a line; a case that is there is not run again. Without a card, `--tiny` runs one small case on the
CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cards.cases import Case, cases, tiny

_AHEAD = 4
_CASE_SECONDS = 75.0


def main() -> int:
    """Returns 0 when every case that was tried has a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("build/cards/results.jsonl"))
    parser.add_argument("--seconds", type=float, default=540.0, help="stop starting cases after this long")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of cases")
    parser.add_argument("--tiny", action="store_true", help="one small case instead")
    parser.add_argument("--rates", action="store_true", help="measure the card's rates first")
    parser.add_argument("--list", action="store_true", help="print names and end")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = [tiny()] if options.tiny else list(cases())
    wanted = [one for one in wanted if not options.only or any(part in one.name for part in options.only)]
    if options.case is not None:
        _work(next(one for one in wanted if one.name == options.case))
        return 0
    if options.list:
        print("\n".join(one.name for one in wanted))
        return 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = finished(options.results)
    if options.rates and "rates" not in done:
        from cards.rates import rates

        _keep(options.results, {"case": "rates", **_apart(rates)})
    extra = ["--tiny"] if options.tiny else []
    return run([one for one in wanted if one.name not in done], options.results, options.seconds, extra)


def _apart(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `work` returns in a process of its own, which leaves nothing on the card."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work).result()


def finished(path: Path) -> frozenset[str]:
    """Returns names of the cases that a results file holds, those that failed left out."""
    if not path.is_file():
        return frozenset()
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return frozenset(record["case"] for record in records if record.get("kind") != "failed")


def run(wanted: list[Case], results: Path, seconds: float, extra: list[str]) -> int:
    """Returns how many of `wanted` failed; results are added to a file."""
    begin, failed = time.monotonic(), 0
    waiting = list(wanted)
    started: list[tuple[Case, subprocess.Popen[str]]] = []
    try:
        while waiting or started:
            while waiting and len(started) < _AHEAD:
                started.append((waiting[0], _start(waiting[0], extra)))
                waiting.pop(0)
            if time.monotonic() - begin > seconds:
                break
            case, process = started.pop(0)
            record = _take(case, process)
            failed += record["kind"] == "failed"
            _keep(results, record)
            took = record.get("median_step_seconds", record.get("error", ""))
            print(f"{time.monotonic() - begin:6.1f} s  {case.name}: {record['kind']} {took}", flush=True)
    finally:
        _end(process for _, process in started)
    return failed


def _start(case: Case, extra: list[str]) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    environment["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{case.config.expandable_segments}"
    command = [sys.executable, __file__, "--case", case.name, *extra]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def _take(case: Case, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the record of a process, which starts on the card only now."""
    watch = threading.Timer(_CASE_SECONDS, process.kill)
    watch.start()
    try:
        output, errors = process.communicate("go\n")
    finally:
        watch.cancel()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        record: dict[str, Any] = json.loads(lines[-1])
        return record
    return {"case": case.name, "kind": "failed", "error": errors.strip()[-1500:], "status": process.returncode}


def _keep(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _end(processes: Iterable[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def _work(case: Case) -> None:
    """Builds, waits for leave to use the card, measures, prints the record."""
    import warnings

    from cards.measuring import measure, prepare

    warnings.simplefilter("ignore")
    model = prepare(case)
    if sys.stdin.readline().strip() == "go":
        print(json.dumps(measure(case, model)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
