"""The lint finds nothing wrong with what memc writes, whatever the rung: every folder of the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import matrix
from memc.lint import Given, Weight, lint_path
from memc.render import render
from planmaker import make_plan

MATRIX = matrix()
TOO_SMALL = "nvme-buffer-too-small"  # the matrix pins buffers for a model of its own, smaller than the plan's


@pytest.mark.parametrize("name", MATRIX)
def test_no_error_in_files_that_memc_writes(name: str, tmp_path: Path) -> None:
    for path, text in render(make_plan(MATRIX[name]), spec_name="s.yaml", command="memc compile s.yaml").items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    found = lint_path(tmp_path, Given())
    assert len(found.documents) >= 4
    errors = {remark.code for remark in found.remarks if remark.weight is Weight.ERROR}
    assert errors <= ({TOO_SMALL} if "nvme" in name else set())
