"""The terminal report on terminals of every kind: narrow, without colour, without Unicode, piped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from memc.plan import Infeasible, Plan
from memc.report import plan_report, refusal_report
from memc.units import GIB
from memc.verdict import plan_verdict, refusal_verdict
from planspecs import plan_of, refusal_of, spec_text
from rich.console import Console


@pytest.fixture(scope="module")
def answers() -> tuple[Plan, Infeasible, Plan]:
    sharded = plan_of(spec_text(method="full", gpu="a100-sxm4-80gb", count="8", host="2000GiB"))
    return plan_of(spec_text()), refusal_of(spec_text(method="full")), sharded


def shown(answer: Plan | Infeasible, width: int) -> list[str]:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(plan_report(answer) if isinstance(answer, Plan) else refusal_report(answer))
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_nothing_is_cut_and_nothing_runs_over(answers: tuple[Plan, Infeasible, Plan], width: int) -> None:
    for answer in answers:
        lines = shown(answer, width)
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        verdict = plan_verdict(answer) if isinstance(answer, Plan) else refusal_verdict(answer)
        words = " ".join(" ".join(lines).split())
        for line in verdict:
            assert " ".join(line.split()) in words


@pytest.mark.parametrize("width", [60, 71, 80])
def test_a_number_keeps_its_unit(answers: tuple[Plan, Infeasible, Plan], width: int) -> None:
    for answer in answers:
        lines = shown(answer, width)
        for line, following in pairwise(lines):
            assert not (re.search(r"\d$", line) and re.match(r"\s*(GiB|MiB|s|min|h|days)\b", following)), line


@pytest.mark.parametrize("width", [60, 80])
def test_every_figure_of_the_bill_is_there(answers: tuple[Plan, Infeasible, Plan], width: int) -> None:
    for answer in answers:
        bill = answer.ledger.gpu if isinstance(answer, Plan) else answer.closest_ledger.gpu
        lines = shown(answer, width)
        lines = lines[lines.index(next(line for line in lines if line.startswith("memory of one GPU"))) :]
        lines = lines[: len(bill.by_phase()) + 2]
        for phase, size in bill.by_phase().items():
            (line,) = (line for line in lines if line.split()[:1] == [phase.value])
            assert line.split()[-1] == f"{size / GIB:.2f}"
            assert ("<-" in line) == (phase is bill.binding_phase)


def run(tmp_path: Path, **environment: str) -> bytes:
    spec = tmp_path / "spec.yaml"
    spec.write_text(spec_text(), encoding="utf-8")
    command = [sys.executable, "-m", "memc", "explain", str(spec)]
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONIOENCODING")}
    return subprocess.run(command, env={**clean, **environment}, capture_output=True, check=True).stdout


def test_a_pipe_gets_no_colour(tmp_path: Path) -> None:
    assert b"\x1b" not in run(tmp_path)


def test_no_color_wins_over_a_request_for_colour(tmp_path: Path) -> None:
    assert b"\x1b[3" in run(tmp_path, FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm-256color")
    assert b"\x1b[3" not in run(tmp_path, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_where_unicode_cannot_be_shown_the_bar_is_ascii(tmp_path: Path, encoding: str) -> None:
    output = run(tmp_path, PYTHONIOENCODING=encoding, COLUMNS="60")
    text = output.decode("ascii")
    assert "\\u" not in text
    assert re.search(r"^  #+[%=+:.-]*\.*$", text, re.MULTILINE)
    assert "# parameters" in text


def test_where_it_can_the_bar_is_drawn_in_blocks(tmp_path: Path) -> None:
    assert "█ parameters" in run(tmp_path, PYTHONIOENCODING="utf-8").decode("utf-8")
