"""Measurements from many places, judged and merged into one file of figures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import memc
from memc.calibration import corpus, locks
from memc.calibration.rates import nearer
from memc.calibration.records import LeftOut, Measurement
from memc.driver import LOCK_NAME
from memc.errors import Diagnostic, Location, MemcError
from memc.facts import GpuFacts, load_fact, load_gpu
from memc.facts.measured import SCHEMA, figures_document, figures_of, read_measured
from memc.facts.records import MeasuredFigure

_SUFFIXES = (".yaml", ".yml")
_FACTOR = 2.0
"""A value that is so many times the median of the others, or so small a part of it, is taken for a mismeasurement."""
_FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Which measurements count.

    Attributes:
        card: Catalogue key that they must be of; empty for any.
        any_version: Whether torch may be of another release than the one that was planned with.
        keep_outliers: Whether values far from all others count.
    """

    card: str = ""
    any_version: bool = False
    keep_outliers: bool = False


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What was found and what becomes of it.

    Attributes:
        measurements: All that count, those of an earlier file included, by card and then in order.
        new: Ids of those that the earlier file did not hold.
        left_out: What was found and does not count.
    """

    measurements: tuple[Measurement, ...]
    new: frozenset[str]
    left_out: tuple[LeftOut, ...]

    @property
    def cards(self) -> tuple[str, ...]:
        """The cards that were measured, sorted."""
        return tuple(sorted({item.card for item in self.measurements}))

    def of(self, card: str) -> list[Measurement]:
        """Returns the measurements of one card."""
        return [item for item in self.measurements if item.card == card]


def collect(paths: Sequence[Path], earlier: Path | None, limits: Limits | None = None) -> Collected:
    """Returns what is measured at or below some paths, together with what an earlier file holds.

    Args:
        paths: Folders with locks at or below them, and files of measurements.
        earlier: File of figures that is merged with; None for none. It need not be there.
        limits: Which measurements count.

    Raises:
        MemcError: When a path is not there or holds nothing that can be read, with every such path;
            ``calibrate-nothing`` when no measurement counts.
    """
    limits = limits or Limits()
    known = _earlier(earlier)
    found, left_out = _found(paths)
    accepted: dict[str, Measurement] = {item.id: item for item in known}
    for item in found:
        reason = _refused(item, limits)
        if reason:
            left_out.append(LeftOut(place=_said(item), reason=reason))
        else:
            accepted[item.id] = _plausible(item, left_out)
    kept = [item for item in accepted.values() if item.figures]
    if not limits.keep_outliers:
        kept = _without_outliers(kept, left_out)
    kept.sort(key=lambda item: item.card)
    new = frozenset(item.id for item in kept) - {item.id for item in known}
    if not kept or (not new and not any(item.id in accepted for item in found)):
        raise _nothing(left_out)
    return Collected(measurements=tuple(kept), new=new, left_out=tuple(left_out))


def document_of(collected: Collected, checked: str) -> dict[str, Any]:
    """Returns the file of figures as a document.

    Args:
        collected: What it holds.
        checked: ISO date of today.
    """
    cards = {}
    for card in collected.cards:
        documents = [item.document() for item in collected.of(card)]
        cards[card] = {"figures": figures_document(figures_for(collected, card)), "measurements": documents}
    return {"schema": SCHEMA, "source": f"memc calibrate {memc.__version__}", "checked": checked, "cards": cards}


def figures_for(collected: Collected, card: str) -> dict[str, MeasuredFigure]:
    """Returns the figures of a card that plans are to use.

    A rate that steps imply is one of them only where the clock comes nearer to those steps with it.
    """
    documents = [item.document() for item in collected.of(card)]
    found = figures_of(documents)
    return {name: figure for name, figure in found.items() if not no_nearer(documents, name, figure)}


def no_nearer(documents: Sequence[Mapping[str, Any]], name: str, figure: MeasuredFigure) -> str:
    """Returns why an implied rate is not used; empty when it is, and for every other figure."""
    if not name.startswith("training_flops_per_second."):
        return ""
    own, published = nearer(documents, name, figure.median)
    if own < published:
        return ""
    return f"not used: the clock's median error over these steps is {own:.1%} with it and {published:.1%} without"


def _earlier(path: Path | None) -> list[Measurement]:
    """Returns the measurements of an earlier file."""
    if path is None or not path.exists():
        return []
    return [
        Measurement(
            id=str(item["id"]),
            card=card,
            kind=str(item.get("kind", "")),
            figures={str(name): float(value) for name, value in item["figures"].items()},
            conditions=dict(item.get("conditions") or {}),
        )
        for card, items in read_measured(path).measurements.items()
        for item in items
    ]


def _found(paths: Sequence[Path]) -> tuple[list[Measurement], list[LeftOut]]:
    """Returns all that is measured at some paths, and what is not used.

    Raises:
        MemcError: With every path that cannot be read.
    """
    problems: list[Diagnostic] = []
    found: list[Measurement] = []
    left_out: list[LeftOut] = []
    folders, files = _places(paths, problems)
    for items in (*(locks.read(folder) for folder in folders), corpus.read(files)):
        try:
            for item in items:
                if isinstance(item, LeftOut):
                    left_out.append(item)
                else:
                    found.append(item)
        except MemcError as error:
            problems += error.diagnostics
    if problems:
        raise MemcError(tuple(problems))
    return found, left_out


def _places(paths: Sequence[Path], problems: list[Diagnostic]) -> tuple[list[Path], list[Path]]:
    """Returns folders with a lock and files of measurements, each once, in the order of the paths."""
    folders: dict[str, Path] = {}
    files: dict[str, Path] = {}
    for path in paths:
        if path.is_dir():
            below = sorted(lock.parent for lock in _locks(path))
            folders |= {os.path.realpath(folder): folder for folder in below}
            if not below:
                problems.append(_no_measurements(path, f"no {LOCK_NAME} lies at or below {path}"))
        elif path.is_file() and path.name == LOCK_NAME:
            folders[os.path.realpath(path.parent)] = path.parent
        elif path.is_file() and path.suffix in _SUFFIXES:
            files[os.path.realpath(path)] = path
        else:
            what = f"{path} is neither a folder nor YAML" if path.exists() else f"{path} is not there"
            problems.append(_no_measurements(path, what))
    return list(folders.values()), list(files.values())


def _locks(path: Path) -> Iterator[Path]:
    """Yields the locks at or below a folder; hidden folders are passed over."""
    for folder, below, names in os.walk(path):
        below[:] = sorted(name for name in below if not name.startswith("."))
        if LOCK_NAME in names:
            yield Path(folder) / LOCK_NAME


def _no_measurements(path: Path, message: str) -> Diagnostic:
    return Diagnostic(
        code="calibrate-path",
        message=message,
        where=Location(file=str(path)),
        hint="name folders that memc compile wrote, collections of measurements, or files of memc probe",
    )


def _refused(item: Measurement, limits: Limits) -> str:
    """Returns why a measurement does not count; empty when it does."""
    if limits.card and item.card != limits.card:
        return f"it was measured on {item.card}, and --gpu asks for {limits.card}"
    planned = str(item.conditions.get("planned_torch") or load_fact("stack.torch").value)
    if not limits.any_version and item.torch and _series(item.torch) != _series(planned):
        return f"it was measured with torch {item.torch}, and {planned} is planned with: --any-version takes it"
    return ""


def _series(version: str) -> list[str]:
    return version.split(".")[:2]


def _plausible(item: Measurement, left_out: list[LeftOut]) -> Measurement:
    """Returns a measurement without figures that the card cannot have, which are noted."""
    gpu = load_gpu(item.card)
    figures = {}
    for name, value in item.figures.items():
        most = _most(name, gpu)
        if value <= 0 or (most is not None and value > most):
            limit = "is not positive" if value <= 0 else f"is above the {most:.4g} that the data sheet allows"
            left_out.append(LeftOut(place=_said(item), reason=f"{name} of {value:.4g} {limit}"))
        else:
            figures[name] = value
    return replace(item, figures=figures)


def _most(name: str, gpu: GpuFacts) -> float | None:
    """Returns the largest value that a figure can have on a card; None when nothing limits it."""
    kind, _, precision = name.partition(".")
    if kind in ("training_flops_per_second", "matmul_flops_per_second"):
        return gpu.peak_flops_per_second.get(precision)
    limits = {
        "context_bytes": gpu.capacity_bytes,
        "memory_bytes_per_second": gpu.memory_bytes_per_second,
        "pcie_bytes_per_second": gpu.pcie_bytes_per_second,
        "pcie_unpinned_bytes_per_second": gpu.pcie_bytes_per_second,
    }
    return limits.get(name)


def _without_outliers(items: Iterable[Measurement], left_out: list[LeftOut]) -> list[Measurement]:
    """Returns measurements without values that are far from all others of their card and kind, which are noted.

    How much an allocator holds differs from plan to plan, so that ratio has no outliers.
    """
    kept = list(items)
    values: dict[tuple[str, str], list[float]] = {}
    for item in kept:
        for name, value in item.figures.items():
            values.setdefault((item.card, name), []).append(value)
    result = []
    for item in kept:
        figures = dict(item.figures)
        for name, value in item.figures.items():
            others = values[item.card, name]
            middle = median(others)
            far = value > _FACTOR * middle or value < middle / _FACTOR
            if far and len(others) >= _FEWEST and not name.startswith("reserved_over_allocated"):
                del figures[name]
                reason = f"{name} of {value:.4g} is far from the median of {len(others)}, {middle:.4g}: an outlier"
                left_out.append(LeftOut(place=_said(item), reason=f"{reason} (--keep-outliers takes it)"))
        if figures:
            result.append(replace(item, figures=figures))
    return result


def _said(item: Measurement) -> str:
    model = item.conditions.get("model")
    return f"{item.kind} on {item.card}" + (f", {model}" if model else "") + f" ({item.id})"


def _nothing(left_out: Sequence[LeftOut]) -> MemcError:
    reasons = tuple(f"{item.place}: {item.reason}" for item in left_out)
    return MemcError(
        (
            Diagnostic(
                code="calibrate-nothing",
                message=f"no measurement counts, of {len(left_out)} that were found",
                context=reasons[:6],
                hint="memc verify measures a folder on the card that it is planned for",
            ),
        )
    )
