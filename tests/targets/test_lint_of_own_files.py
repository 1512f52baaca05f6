"""The lint finds nothing wrong with what memc writes, whatever the rung: every folder of the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import matrix, run_settings
from memc.lint import Given, Weight, lint_path
from specmaker import compile_folder

MATRIX = matrix()


@pytest.mark.parametrize("name", MATRIX)
def test_no_error_in_files_that_memc_writes(name: str, tmp_path: Path) -> None:
    folder = compile_folder(tmp_path / name, MATRIX[name], **run_settings(name))
    found = lint_path(folder, Given())
    assert len(found.documents) >= 4
    assert [remark.message for remark in found.remarks if remark.weight is Weight.ERROR] == []
