"""Rehearses every GPU folder of examples/ on cards that do not exist: the first, the middle and the last rank of each.

The folders are copied first, so that the checked-in locks stay as they are. The last line printed is one JSON object:
folders, ranks, what failed and why, and what the ledger was off by.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import cuda_torch

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Returns 0 when every folder rehearses and fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="*", type=Path, help="folders that memc wrote (default: those of examples/)")
    parser.add_argument("--ranks", default="0,middle,last")
    parser.add_argument("--steps", default="3")
    options = parser.parse_args()
    if cuda_torch.main() != 0:
        print(json.dumps({"folders": 0, "skipped": "the CUDA build of torch cannot be had here"}))
        return 0
    outcomes = [rehearsed(folder, options.ranks, options.steps) for folder in options.folders or examples()]
    failed = {one["folder"]: one["why"] for one in outcomes if one["why"]}
    print(json.dumps({"folders": len(outcomes), "failed": failed, "outcomes": outcomes}))
    return 1 if failed else 0


def examples() -> Iterator[Path]:
    """Yields the folders of the gallery."""
    for lock in sorted(ROOT.glob("examples/*/out/memc.lock")):
        yield lock.parent


def rehearsed(folder: Path, ranks: str, steps: str) -> dict[str, Any]:
    """Returns what became of one folder."""
    started = monotonic()
    with tempfile.TemporaryDirectory(prefix="memc-rehearse-") as scratch:
        copy = Path(scratch) / folder.resolve().parent.name / folder.name
        shutil.copytree(folder, copy)
        command = [sys.executable, "-m", "memc", "rehearse", str(copy), "--ranks", ranks, "--steps", steps, "--json"]
        run = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    outcome: dict[str, Any] = {
        "folder": folder.resolve().parent.name,
        "exit_code": run.returncode,
        "seconds": round(monotonic() - started, 1),
        "why": "",
    }
    try:
        document = json.loads(run.stdout)
    except ValueError:
        return outcome | {"why": " ".join(run.stderr.split())[-300:]}
    if run.returncode:
        outcome["why"] = " · ".join(one["message"] for one in document["diagnostics"]) or "it does not fit"
    played = [
        {
            "rank": rank["rank"],
            "reserved_bytes": rank["peak_reserved_bytes"],
            "host_bytes": rank["host_rss_peak_bytes"],
            "pinned_bytes": rank["host_pinned_peak_bytes"],
        }
        for rank in document["ranks"]
    ]
    outcome |= {"ranks": played, "off_by_bytes": document["difference_bytes"], "unmodelled": document["unmodelled"]}
    print(f"{outcome['folder']}: exit {run.returncode}, {outcome['seconds']} s {outcome['why']}", flush=True)
    return outcome


def environment() -> dict[str, str]:
    """Returns the environment of a rehearsal: with the CUDA build of torch before any other."""
    if cuda_torch.has_cuda(None):
        return dict(os.environ)
    paths = [str(cuda_torch.PLACE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    sys.exit(main())
