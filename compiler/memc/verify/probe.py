"""What each rank of the emitted script writes when it is asked to probe: `rank<r>.json`, schema memc/probe/1."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROBE_SCHEMA = "memc/probe/1"

LEDGER_PHASES: dict[str, tuple[str, ...]] = {
    "load": ("load",),
    "first_step": ("forward", "loss", "backward", "step"),
    "steady": ("forward", "loss", "backward", "step"),
    "evaluate": ("evaluate",),
    "save": ("save",),
    "resume": ("resume",),
    "resumed_step": ("forward", "loss", "backward", "step"),
}
"""Probed phase → the ledger phases that happen in it."""


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """Peaks of one probed phase, as torch's allocator counted them."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankError:
    """Why a rank stopped.

    Attributes:
        kind: ``out-of-memory`` or ``exception``.
        phase: Probed phase it was in; empty when unknown.
        message: The exception's text.
    """

    kind: str
    phase: str
    message: str


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The measurement of one rank.

    Attributes:
        rank, world_size: Its number, and how many there are.
        device: ``cuda`` or ``cpu``.
        device_name: As the driver names it.
        device_uuid: The card's own number, without a prefix; empty when unknown.
        capacity_bytes: Memory that torch sees; None on a CPU.
        driver: Version of the GPU driver; empty when unknown.
        phases: Probed phase → peaks, only phases that were measured; empty on a CPU.
        device_used_bytes: Memory in use on the whole card, as the driver counts it; None when unknown.
        host_rss_peak_bytes: Largest resident size of the process; None when unknown.
        host_pinned_peak_bytes: Most pinned host memory that torch's allocator held; None when unknown.
        held_bytes: Account → kind of device (``cuda`` or ``cpu``) → what lay there at the end of the first step, before
            gradients were let go of; without an account that cannot be seen. Empty when it did not come so far.
        reserved_bytes_by_step: Reserved memory at the end of each step; empty on a CPU.
        settled: Whether reserved memory stopped growing; None on a CPU.
        allocator_settings: What PYTORCH_ALLOC_CONF said; empty when nothing.
        step_seconds: Of each optimizer step, in order; the first includes warm-up.
        tokens_per_second: Of this rank, after the first step; None when unknown.
        losses: Training loss of each step; NaN where the script found none.
        versions: Library → version.
        error: Why it stopped; None when it ended well.
    """

    rank: int
    world_size: int
    device: str
    device_name: str
    device_uuid: str
    capacity_bytes: int | None
    driver: str
    phases: dict[str, PhasePeak]
    device_used_bytes: int | None
    host_rss_peak_bytes: int | None
    host_pinned_peak_bytes: int | None
    held_bytes: dict[str, dict[str, int]]
    reserved_bytes_by_step: tuple[int, ...]
    settled: bool | None
    allocator_settings: str
    step_seconds: tuple[float, ...]
    tokens_per_second: float | None
    losses: tuple[float, ...]
    versions: dict[str, str]
    error: RankError | None

    @property
    def peak_allocated_bytes(self) -> int:
        """Largest over phases; 0 when none was measured."""
        return max((peak.allocated_bytes for peak in self.phases.values()), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Largest over phases; 0 when none was measured."""
        return max((peak.reserved_bytes for peak in self.phases.values()), default=0)

    @property
    def steady_step_seconds(self) -> float | None:
        """Median over all steps but the first; of the first when it is the only one; None without steps."""
        counted = self.step_seconds[1:] or self.step_seconds
        return statistics.median(counted) if counted else None

    @property
    def trained(self) -> bool:
        """Whether it made at least one step and every loss is a finite number."""
        return bool(self.losses) and all(math.isfinite(loss) for loss in self.losses)


def read_reports(folder: Path) -> tuple[tuple[RankReport, ...], tuple[str, ...]]:
    """Returns the reports found in `folder`, by rank, and one sentence for each file that could not be read."""
    reports: dict[int, RankReport] = {}
    broken = []
    for path in sorted(folder.glob("rank*.json")):
        try:
            report = _report(json.loads(path.read_text(encoding="utf-8")))
            if path.name != f"rank{report.rank}.json":
                raise ValueError(f"it says rank {report.rank}")
            reports[report.rank] = report
        except KeyError as error:
            broken.append(f"{path.name} lacks {error}")
        except (OSError, TypeError, ValueError, AttributeError) as error:
            broken.append(f"{path.name} cannot be read: {error}")
    return tuple(reports[rank] for rank in sorted(reports)), tuple(broken)


def _report(document: dict[str, Any]) -> RankReport:
    if document["schema"] != PROBE_SCHEMA:
        raise ValueError(f"schema {document['schema']!r}, expected {PROBE_SCHEMA!r}")
    if document["device"] not in ("cuda", "cpu"):
        raise ValueError(f"device {document['device']!r}, expected 'cuda' or 'cpu'")
    error = document["error"]
    return RankReport(
        rank=int(document["rank"]),
        world_size=int(document["world_size"]),
        device=document["device"],
        device_name=str(document["device_name"] or ""),
        device_uuid=str(document.get("device_uuid") or ""),
        capacity_bytes=_optional_int(document["capacity_bytes"]),
        driver=str(document["driver"] or ""),
        phases=_phases(document["phases"]),
        device_used_bytes=_optional_int(document["device_used_bytes"]),
        host_rss_peak_bytes=_optional_int(document["host_rss_peak_bytes"]),
        host_pinned_peak_bytes=_optional_int(document.get("host_pinned_peak_bytes")),
        held_bytes=_held(document.get("held_bytes") or {}),
        reserved_bytes_by_step=tuple(int(size) for size in document.get("reserved_bytes_by_step") or ()),
        settled=None if (settled := document.get("settled")) is None else bool(settled),
        allocator_settings=str(document.get("allocator_settings") or ""),
        step_seconds=tuple(float(seconds) for seconds in document["step_seconds"]),
        tokens_per_second=_optional_float(document["tokens_per_second"]),
        losses=tuple(math.nan if loss is None else float(loss) for loss in document["losses"]),
        versions={str(name): str(version) for name, version in document["versions"].items()},
        error=None
        if error is None
        else RankError(**{key: str(error[key] or "") for key in ("kind", "phase", "message")}),
    )


def _phases(document: dict[str, dict[str, Any] | None]) -> dict[str, PhasePeak]:
    peaks = {}
    for name, sizes in document.items():
        if name not in LEDGER_PHASES:
            raise ValueError(f"unknown phase {name!r}; known: {', '.join(LEDGER_PHASES)}")
        if sizes is None or sizes["allocated_bytes"] is None or sizes["reserved_bytes"] is None:
            continue
        peaks[name] = PhasePeak(
            allocated_bytes=int(sizes["allocated_bytes"]), reserved_bytes=int(sizes["reserved_bytes"])
        )
    return peaks


def _held(document: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Returns what is held, without accounts of which nothing was seen on any device."""
    held = {}
    for account, sizes in document.items():
        by_device = {str(kind): int(size) for kind, size in sizes.items()}
        if any(by_device.values()):
            held[str(account)] = by_device
    return held


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)
