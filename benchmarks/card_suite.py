"""Measures training steps on a card: memory by phase and step time of models with random weights.

Each case runs in a process of its own with a time limit, so that one that fails ends no other; the next processes
already import and build while one runs, and take the card only when it is free. Results are added to a file as they
come, one JSON object a line; a case that is there is not run again. Without a card, `--tiny` runs one small case on the
CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cards.cases import TINY, Case, cases, tiny
from memc.verify.operators import abandoned_locks, locks_held_by, release, removing

_AHEAD = 4
_CASE_SECONDS = 75.0
_TINY_SECONDS = 300.0
"""Of a tiny case, whose process imports its libraries within this time too."""


def main() -> int:
    """Returns 0 when every case that was tried has a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("build/cards/results.jsonl"))
    parser.add_argument("--seconds", type=float, default=540.0, help="stop starting cases after this long")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of cases")
    parser.add_argument("--tiny", action="store_true", help="small cases instead, which a CPU runs")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, with its price, and end")
    parser.add_argument("--rates", action="store_true", help="measure the card's rates first")
    parser.add_argument("--list", action="store_true", help="print names and end")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = list(tiny() if options.tiny else cases())
    wanted = [one for one in wanted if not options.only or any(part in one.name for part in options.only)]
    if options.case is not None:
        _work(next(one for one in wanted if one.name == options.case))
        return 0
    if options.list:
        print("\n".join(one.name for one in wanted))
        return 0
    if options.dry_run:
        print("\n".join(dry_run(wanted, finished(options.results), options.seconds)))
        return 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = finished(options.results)
    if options.rates and "rates" not in done:
        from cards.rates import rates

        _keep(options.results, {"case": "rates", **_apart(rates)})
    extra = ["--tiny"] if options.tiny else []
    ahead = 2 if options.tiny else _AHEAD
    return run([one for one in wanted if one.name not in done], options.results, options.seconds, extra, ahead)


def dry_run(wanted: Sequence[Case], done: Container[str], seconds: float) -> Iterator[str]:
    """Yields what a run would do: each case with what it needs on the card and how long its steps take.

    A case takes its steps (`cards.measuring`) and the time to build and fill its model, which nothing here predicts:
    the steps alone are added up, and how many cases a run of `seconds` holds is known when it has run.
    """
    from cards.judging import priced
    from cards.judging import seconds as step_seconds
    from cards.steps import steps_for

    total, waiting = 0.0, 0
    for one in wanted:
        if one.name in done:
            yield f"{'there already':>28}  {one.name}"
            continue
        waiting += 1
        need, each = priced(one.model, one.config).gpu.required_bytes, step_seconds(one.model, one.config)
        steps = steps_for(each)
        total += steps * each
        yield f"{need / 2**30:7.2f} GiB {steps:3} x {each:6.2f} s  {one.name}"
    yield (
        f"{waiting} of {len(wanted)} cases would run: {total:.0f} s of steps, in calls of {seconds:.0f} s with at most "
        f"{_CASE_SECONDS:.0f} s for a case; what is measured is kept, and the next call goes on"
    )


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


def run(wanted: list[Case], results: Path, seconds: float, extra: list[str], ahead: int = _AHEAD) -> int:
    """Returns how many of `wanted` failed; results are added to a file, `ahead` processes are started in advance."""
    begin, failed = time.monotonic(), 0
    waiting = list(wanted)
    started: list[tuple[Case, subprocess.Popen[str]]] = []
    if locks := abandoned_locks(os.environ):
        print(f"cases that need it will wait in vain; {removing(locks)}", file=sys.stderr)
    try:
        while waiting or started:
            while waiting and len(started) < ahead:
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
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
    )


def _take(case: Case, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the record of a process, which starts on the card only now."""
    watch = threading.Timer(_CASE_SECONDS if case.model != TINY else _TINY_SECONDS, _kill, [process])
    watch.start()
    try:
        output, errors = process.communicate("go\n")
    except BaseException:
        _kill(process)
        raise
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
        _kill(process)
        process.communicate()


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process with all that it started; an operator that it was compiling stays locked for no other case."""
    locks = locks_held_by([process.pid], os.environ)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    release(locks, os.environ)


def _work(case: Case) -> None:
    """Builds, waits for leave to use the card, measures, prints the record."""
    import warnings

    from cards.measuring import measure, prepare

    warnings.simplefilter("ignore")
    models = prepare(case)
    if sys.stdin.readline().strip() == "go":
        print(json.dumps(measure(case, models)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
