"""Launcher folders for the tests of verify: a real launch.sh, real rank reports, a real lock."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

GIB = 1024**3

BACKWARD = ("backward_first_layer", "backward_last_layer")


def entry(account: str, gib: int, moments: list[str], *, in_allocator: bool = True) -> dict[str, Any]:
    """Returns what verify reads of one entry of the lock."""
    name = f"{account}-of-{gib}"
    return {"name": name, "account": account, "bytes": gib * GIB, "moments": moments, "in_allocator": in_allocator}


LOCK: dict[str, Any] = {
    "schema": "memc/lock/1",
    "spec": {"name": "spec.yaml"},
    "plan": {"settings": {"gpus_per_node": 1, "nodes": 1, "micro_batch_size": 2}},
    "ledger": {
        "gpu": {
            "peak_allocated_bytes": 15 * GIB,
            "peak_reserved_bytes": 16 * GIB,
            "required_bytes": 17 * GIB,
            "uncertainty_bytes": GIB,
            "binding_phase": "backward",
            "by_phase": {
                "load": 13 * GIB,
                "forward": 14 * GIB,
                "loss": 14 * GIB,
                "backward": 15 * GIB,
                "step": 13 * GIB,
                "evaluate": 14 * GIB,
                "save": 13 * GIB,
                "resume": 13 * GIB,
            },
            "entries": [
                entry("parameters", 9, ["load", "forward", "loss", *BACKWARD, "step", "evaluate", "save", "resume"]),
                entry("optimizer_states", 4, ["load", "step", "save", "resume"]),
                entry("activations", 5, ["forward", "loss", "backward_first_layer", "evaluate"]),
                entry("activations", 6, ["backward_last_layer"]),
                entry("workspace", 2, [], in_allocator=False),
            ],
        }
    },
    "budget": {"gpu_bytes": 20 * GIB},
    "clock": {"step_seconds": 2.0},
    "measurements": [],
}

RUN = """#!/usr/bin/env bash
set -euo pipefail
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
while (($#)); do
  case "$1" in
    --probe) probe="$2"; shift 2 ;;
    *) echo "argument $1"; shift ;;
  esac
done
echo "started from $PWD"
"""

COPY_REPORTS = RUN + 'cp "$here"/reports/rank*.json "$probe"/\n'


def rank_report(rank: int = 0, world_size: int = 1, *, peak_gib: float = 15.5, **changes: Any) -> dict[str, Any]:
    """Returns what one rank on a GPU writes; `peak_gib` is the reserved peak of the steady state."""
    peak = int(peak_gib * GIB)
    allocated = peak - GIB // 2
    sizes = {
        "load": (13 * GIB, 13 * GIB),
        "first_step": (allocated, peak),
        "steady": (allocated, peak),
        "evaluate": (13 * GIB, peak),
        "save": (13 * GIB, peak),
    }
    report = {
        "schema": "memc/probe/1",
        "rank": rank,
        "world_size": world_size,
        "device": "cuda",
        "device_name": "NVIDIA GeForce RTX 4090",
        "capacity_bytes": 23 * GIB,
        "driver": "570.86",
        "phases": {name: {"allocated_bytes": a, "reserved_bytes": r} for name, (a, r) in sizes.items()},
        "device_used_bytes": peak + GIB // 2,
        "host_rss_peak_bytes": 3 * GIB,
        "step_seconds": [5.0, 2.1, 2.0, 2.2],
        "tokens_per_second": 3900.5,
        "losses": [2.5, 2.4, 2.3, 2.2],
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        "error": None,
    }
    return report | changes


def cpu_report(rank: int = 0, world_size: int = 1, **changes: Any) -> dict[str, Any]:
    """Returns what one rank on a CPU writes: no capacity, no peaks."""
    nothing = {"allocated_bytes": None, "reserved_bytes": None}
    cpu = {
        "device": "cpu",
        "device_name": None,
        "capacity_bytes": None,
        "driver": None,
        "phases": dict.fromkeys(("load", "first_step", "steady", "evaluate", "save"), nothing),
        "device_used_bytes": None,
    }
    return rank_report(rank, world_size, **(cpu | changes))


def write_folder(
    folder: Path, *reports: dict[str, Any], launcher: str = COPY_REPORTS, settings: dict[str, Any] | None = None
) -> Path:
    """Returns `folder`, filled with a launcher, the reports it hands out, and a lock over both."""
    (folder / "reports").mkdir(parents=True)
    files = {"launch.sh": launcher}
    for report in reports:
        files[f"reports/rank{report['rank']}.json"] = json.dumps(report)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    document = json.loads(json.dumps(LOCK))
    document["plan"]["settings"] |= settings or {}
    document["files"] = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    write_lock(folder, document)
    return folder


def write_lock(folder: Path, document: dict[str, Any]) -> None:
    """Writes the lock as memc does: sorted keys, two spaces, one newline at the end."""
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (folder / "memc.lock").write_text(text, encoding="utf-8")


def read_lock_document(folder: Path) -> dict[str, Any]:
    """Returns the lock as a plain dict."""
    document: dict[str, Any] = json.loads((folder / "memc.lock").read_text(encoding="utf-8"))
    return document
