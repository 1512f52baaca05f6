"""Calibration: a card's facts with what the user measured in the place of what the catalogue says, and said so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from memc.errors import Location, MemcError, usage_error
from memc.facts.measured import MeasuredFile, figures_in, read_measured, user_path
from memc.facts.records import Calibration, GpuFacts, MeasuredFigure
from memc.units import MIB

USER_FACTS = "user facts"
_MATMUL = "matmul_flops_per_second."
_FIXED: ContextVar[tuple[Calibration | None] | None] = ContextVar("memc_calibration", default=None)


@contextmanager
def planned_with(calibration: Calibration | None) -> Iterator[None]:
    """Makes every card planned with these figures, or with none, whatever the user's own facts say."""
    token = _FIXED.set((calibration,))
    try:
        yield
    finally:
        _FIXED.reset(token)


def planned(gpu: GpuFacts) -> GpuFacts:
    """Returns a card's facts as plans use them: with what the user measured on such a card, where they did.

    Raises:
        MemcError: When the file of the user's figures cannot be read.
    """
    fixed = _FIXED.get()
    return calibrated(gpu, user_calibration(gpu.key) if fixed is None else fixed[0])


def user_calibration(key: str) -> Calibration | None:
    """Returns the user's own figures of a card; None when there are none, or they are switched off.

    Raises:
        MemcError: When the file cannot be read.
    """
    path = user_path()
    if path is None or not path.is_file():
        return None
    state = path.stat()
    figures = _user_file(path, state.st_mtime_ns, state.st_size).cards.get(key)
    return Calibration(origin=USER_FACTS, figures=figures) if figures else None


@lru_cache(maxsize=1)
def _user_file(path: Path, _changed_ns: int, _size_bytes: int) -> MeasuredFile:
    """Returns what the file holds; read once as long as it stays the same."""
    return read_measured(path)


def file_calibration(path: Path, name: str, key: str) -> Calibration:
    """Returns the figures of a hardware file for a card.

    Args:
        path: The file.
        name: As the spec names it.
        key: Catalogue key of the spec's card.

    Raises:
        MemcError: When it cannot be read; ``hardware-file-other-card`` when it was measured on other cards only.
    """
    found = read_measured(path, name=name)
    if found.cards and key not in found.cards:
        raise usage_error(
            "hardware-file-other-card",
            f"{name} was measured on {', '.join(sorted(found.cards))}, and the spec is for {key}",
            where=Location(file=name, field="cards"),
            hint=f"write `gpu: {min(found.cards)}`, or run memc probe on a machine with a {key}",
        )
    return Calibration(origin=name, figures={**found.host, **found.cards.get(key, {})})


def calibrated(gpu: GpuFacts, calibration: Calibration | None) -> GpuFacts:
    """Returns a card's facts with measured figures in the place of the catalogue's; None leaves them alone."""
    if calibration is None or not calibration.figures:
        return gpu
    figures = calibration.figures
    products = {
        name.removeprefix(_MATMUL): figure.median for name, figure in figures.items() if name.startswith(_MATMUL)
    }
    return replace(
        gpu,
        calibration=calibration,
        achieved_memory_bytes_per_second=_median(figures, "memory_bytes_per_second")
        or gpu.achieved_memory_bytes_per_second,
        achieved_pcie_bytes_per_second=_median(figures, "pcie_bytes_per_second") or gpu.achieved_pcie_bytes_per_second,
        achieved_allreduce_bytes_per_second=_median(figures, "allreduce_bytes_per_second")
        or gpu.achieved_allreduce_bytes_per_second,
        sustained_flops_per_second={**(gpu.sustained_flops_per_second or {}), **products} or None,
    )


def calibration_of(document: Any) -> Calibration | None:
    """Returns the calibration that a lock holds; None when it holds none, or none that can be read."""
    if not isinstance(document, dict):
        return None
    try:
        figures = figures_in(document.get("figures"), "memc.lock", "calibration.figures")
    except MemcError:
        return None
    return Calibration(origin=str(document.get("origin", "")), figures=figures) if figures else None


def calibration_lines(gpu: GpuFacts) -> list[str]:
    """Returns one sentence for each measured figure that a plan may rest on, the origin first; empty without."""
    calibration = gpu.calibration
    if calibration is None:
        return []
    lines = [f"figures measured on {gpu.key} stand in for the catalogue's ({calibration.origin})"]
    return [*lines, *(_line(name, figure) for name, figure in calibration.figures.items())]


def _line(name: str, figure: MeasuredFigure) -> str:
    words = name.partition(".")
    said = words[0].replace("_per_second", "").replace("_bytes", "").replace("_flops", "").replace("_params", "")
    spread = f", {format_figure(name, figure.minimum)} to {format_figure(name, figure.maximum)}"
    runs = f"{figure.count} measurement" + ("s" if figure.count > 1 else "")
    precision = f" {words[2]}" if words[2] else ""
    return (
        f"{said.replace('_', ' ')}{precision}: {format_figure(name, figure.median)} "
        f"(median of {runs}{spread if figure.count > 1 else ''})"
    )


def format_figure(name: str, value: float) -> str:
    """Returns a figure for display, in the unit that its name ends with."""
    kind = name.partition(".")[0]
    if kind.endswith("flops_per_second"):
        return f"{value / 1e12:.1f} TFLOP/s"
    if kind.endswith("params_per_second"):
        return f"{value / 1e9:.2f} billion elements/s"
    if kind.endswith("bytes_per_second"):
        return f"{value / 1e9:.2f} GB/s"
    return f"{value / MIB:.1f} MiB" if kind.endswith("bytes") else f"{value:.3f}"


def _median(figures: Mapping[str, MeasuredFigure], name: str) -> float | None:
    return figures[name].median if name in figures else None
