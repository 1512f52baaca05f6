"""The skip ledger of conftest.py: counted, explained, and fatal without a reason, with and without workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

EXPLAINED = """
import pytest
@pytest.mark.skip(reason="needs a moon")
def test_a(): pass
def test_b(): pytest.skip("needs a moon")
def test_c(): pass
"""


def run_pytest(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n", encoding="utf-8")
    (folder / "test_it.py").write_text(test, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_explained_skips_are_counted_and_pass(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run_pytest(tmp_path, EXPLAINED, *options)
    assert done.returncode == 0, done.stdout
    assert "skipped tests: 2\n  2 × needs a moon" in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2")])
@pytest.mark.parametrize(
    "skip",
    [
        "@pytest.mark.skip\ndef test_a(): pass",
        "def test_a(): pytest.skip()",
        "pytest.skip(allow_module_level=True)",
    ],
)
def test_a_skip_without_reason_fails_the_run(tmp_path: Path, skip: str, options: tuple[str, ...]) -> None:
    (tmp_path / "test_other.py").write_text("def test_c(): pass\n", encoding="utf-8")
    done = run_pytest(tmp_path, f"import pytest\n{skip}\n", *options)
    assert done.returncode == 1, done.stdout
    assert "skipped without a reason, which fails the run" in done.stdout


def test_no_skip_is_said_too(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_c(): pass\n")
    assert done.returncode == 0
    assert "skipped tests: 0" in done.stdout
