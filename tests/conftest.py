"""For every test: what needs a GPU is skipped without one, and every skip is counted and must say why."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter

import pytest


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("MEMC_CERTIFY", "0")  # tests that are not about it compile without a trace
    os.environ.setdefault("MEMC_CALIBRATION", "off")  # nor with what was measured on the cards of who runs them
    config.pluginmanager.register(SkipLedger(), "skip-ledger")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` on a machine without one. torch is asked only when there is such a test."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _cuda_is_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


class SkipLedger:
    """Counts skips by reason, prints them, and fails the run when one has none."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.unexplained: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report.nodeid, report.longrepr)

    def _note(self, test: str, longrepr: object) -> None:
        text = str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
        reason = text.removeprefix("Skipped").removeprefix(":").strip()
        self.reasons[reason] += 1
        if reason in ("", "unconditional skip"):
            self.unexplained.append(test)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexplained and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"skipped tests: {self.reasons.total()}")
        for reason, count in sorted(self.reasons.items()):
            terminalreporter.write_line(f"  {count} × {reason or 'no reason given'}")
        for test in self.unexplained:
            terminalreporter.write_line(f"skipped without a reason, which fails the run: {test}", red=True)
