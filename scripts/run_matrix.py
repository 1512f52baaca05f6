"""Compiles the matrix of targets, shows each folder to its readers and trains those that a CPU can train.

Prints what did not run and why; the last line is one JSON object: how many folders were compiled, how many were
accepted by every program that reads them, how many trained, saved, loaded and went on, and how many failed anywhere.

Usage: python scripts/run_matrix.py [--all] [arguments of pytest]
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_ACCEPTED = _TESTS / "targets" / "test_consumers.py"
_RAN = [_TESTS / "e2e" / name for name in ("test_matrix.py", "test_preference.py", "test_classification.py")]


class Tally:
    """Notes, by case of the matrix, whether its tests passed."""

    def __init__(self) -> None:
        self.accepted: dict[str, bool] = {}
        self.ran: dict[str, bool] = {}
        self.other_failures: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        """A case passed when each of its tests did, set-up and end included."""
        case = re.search(r"\[([^\]]+)\]$", report.nodeid)
        if "e2e" in report.nodeid and "test_matrix.py" not in report.nodeid:
            case = re.search(r"test_(\w+\.py::.+)()$", report.nodeid)  # a task of its own: each test is a run
        found = self.ran if "e2e" in report.nodeid else self.accepted
        if case is not None and (report.when == "call" or report.failed):
            found[case[1]] = found.get(case[1], True) and report.passed
        elif report.failed:
            self.other_failures.append(report.nodeid)


def not_run(ran: set[str]) -> dict[str, str]:
    """Returns by case of the matrix why it did not run: it cannot, another one is the same, or it was left out."""
    matrix, runs_module = import_module("matrix"), import_module("runs")
    runs, same = runs_module.distinct_runs()
    reasons = {}
    for name, config in matrix.matrix().items():
        if name in ran:
            continue
        if (reason := runs_module.why_not(config, matrix.kind_of(name))) is not None:
            reasons[name] = reason
        elif name in same:
            reasons[name] = f"the same run as {same[name]}"
        elif name in runs:
            reasons[name] = "runs with --all"
    return reasons


def main() -> int:
    """Returns 0 when every folder was compiled and accepted, and every run passed."""
    arguments = sys.argv[1:]
    if "--all" in arguments:
        arguments.remove("--all")
        os.environ["MEMC_MATRIX"] = "all"
    sys.path[:0] = [str(_TESTS), str(_TESTS / "targets"), str(_TESTS / "e2e")]
    import_module("torch_extensions").framework_environment()  # removes locks that a killed session left
    tally = Tally()
    places = [str(path) for path in (_ACCEPTED, *_RAN) if path.is_file()]
    status = pytest.main([*places, "-q", *arguments], plugins=[tally])
    ran = {name for name, passed in tally.ran.items() if passed}
    reasons = not_run(set(tally.ran))
    print(f"\nnot run ({len(reasons)}):")
    for name, reason in reasons.items():
        print(f"  {name:32}{reason}")
    failed = sorted({name for found in (tally.accepted, tally.ran) for name, passed in found.items() if not passed})
    summary = {
        "compiled": len(tally.accepted),
        "accepted": sum(tally.accepted.values()),
        "ran": len(ran),
        "failed": len(failed) + len(tally.other_failures),
    }
    if failed or tally.other_failures:
        print("failed: " + ", ".join([*failed, *tally.other_failures]))
    print(json.dumps(summary))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
