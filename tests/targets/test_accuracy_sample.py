"""A fixed sample of the catalogue, traced anew: the checked-in traces are what the installed stack gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from agreement.cases import MODES, Mode
from agreement.traces import read_table, trace_cases

COUNT = 6


def sample() -> list[tuple[str, Mode]]:
    """Returns cases spread evenly over the table."""
    modes = {str(mode): mode for mode in MODES}
    known = sorted(read_table().peaks)
    return [(model, modes[mode]) for model, mode in known[:: max(1, len(known) // COUNT)]]


@pytest.mark.parametrize(("model", "mode"), sample(), ids=lambda value: str(value).replace("/", "-"))
def test_a_case_is_traced_as_it_was(model: str, mode: Mode) -> None:
    (case,) = trace_cases(model, [mode])
    assert case.error == ""
    assert case.peak_bytes == read_table().peaks[model, str(mode)]
