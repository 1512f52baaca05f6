"""Puts the CUDA build of torch into build/cuda, beside whatever torch the environment has, and prints where it is.

A rehearsal needs its libraries alone: not the gigabytes of CUDA that it depends on, and no GPU. Where the wheel cannot
be had, it says why, and what needs it is skipped.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "cuda"
TIMEOUT_SECONDS = 900


def main() -> int:
    """Returns 0 when it is there, 1 when it cannot be had."""
    if has_cuda(None):
        print("the environment's own torch is the CUDA build")
        return 0
    if not has_cuda(PLACE):
        pinned = re.search(
            r"^torch==(\S+)", (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8"), re.MULTILINE
        )
        assert pinned is not None
        # ===: a CPU build is named version+cpu, and counts as the version wherever pip is told of one.
        failed = install(f"torch==={pinned[1].partition('+')[0]}") or install(triton_of(PLACE))
        if failed or not has_cuda(PLACE):
            shutil.rmtree(PLACE, ignore_errors=True)
            print(f"no CUDA build of torch: {failed or 'the wheel is a CPU build'}", file=sys.stderr)
            return 1
    print(PLACE)
    return 0


def has_cuda(place: Path | None) -> bool:
    """Returns whether torch, in a folder or in this environment, is built for CUDA and has its triton."""
    if place is None:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return False
        folder, triton = Path(found.origin).parent, importlib.util.find_spec("triton") is not None
    else:
        folder, triton = place / "torch", (place / "triton").is_dir()
    version = folder / "version.py"
    return triton and version.is_file() and re.search(r"^cuda\S*.*= '", version.read_text(), re.MULTILINE) is not None


def install(requirement: str) -> str:
    """Returns why a package could not be put into `PLACE`; empty when it was."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    try:
        subprocess.run(
            [*command, "--target", str(PLACE), requirement],
            check=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        return " ".join(error.stderr.split())[-200:]
    except subprocess.TimeoutExpired:
        return f"{requirement} was not there after {TIMEOUT_SECONDS} s"
    return ""


def triton_of(place: Path) -> str:
    """Returns the triton that the torch in a folder asks for."""
    needs: Sequence[str] = next(
        (found.requires or [] for found in distributions(path=[str(place)]) if found.metadata["Name"] == "torch"), []
    )
    return next((need.partition(";")[0].strip() for need in needs if need.startswith("triton")), "triton")


if __name__ == "__main__":
    sys.exit(main())
