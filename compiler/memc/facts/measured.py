"""Files of measured figures: what `memc calibrate` and `memc probe` write, and where a user's own are kept."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from memc.errors import Location, MemcError, usage_error
from memc.facts.documents import nearest, parse_spec
from memc.facts.records import MeasuredFigure

SCHEMA = "memc/measured/1"
SWITCH = "MEMC_CALIBRATION"
"""Environment variable: the file of a user's own figures, or ``off``."""
_OFF = ("", "0", "off", "no", "false")
_PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8")

FIGURES: dict[str, str] = {
    "context_bytes": "CUDA context, kernels and libraries of one process, outside torch's allocator",
    "reserved_over_allocated": "peak that the allocator holds over what tensors hold, with expandable segments",
    "reserved_over_allocated_fixed_segments": "the same without expandable segments",
    **{f"training_flops_per_second.{name}": f"{name} matrix products within training steps" for name in _PRECISIONS},
    **{f"matmul_flops_per_second.{name}": f"{name} matrix products by themselves, large" for name in _PRECISIONS},
    "memory_bytes_per_second": "copies within the card's memory, read and written",
    "pcie_bytes_per_second": "pinned copies between host and card, the slower direction",
    "pcie_unpinned_bytes_per_second": "pageable copies between host and card, the slower direction",
    "allreduce_bytes_per_second": "bus bandwidth of all-reduce between the node's cards, large payloads",
    "host_memory_bytes_per_second": "copies within host memory, read and written",
    "host_adam_params_per_second": "elements that DeepSpeed's CPU Adam updates on a node",
    "torch_host_adam_params_per_second": "elements that torch's fused AdamW updates on a node's processor",
    "nvme_read_bytes_per_second": "reads from the drive, past the page cache",
    "nvme_write_bytes_per_second": "writes to the drive, until they are there",
}
"""Every figure that can be measured, and what it is. The name ends with its unit; ratios have none."""


@dataclass(frozen=True, kw_only=True)
class MeasuredFile:
    """What one file of measured figures holds.

    Attributes:
        source: Who wrote it, with what.
        checked: ISO date of the last measurement in it.
        cards: Figures by catalogue key of the card.
        host: Figures of the host, which belong to whatever card is in it.
        measurements: The single measurements of each card, as they stand in the file.
    """

    source: str
    checked: str
    cards: dict[str, dict[str, MeasuredFigure]]
    host: dict[str, MeasuredFigure]
    measurements: dict[str, tuple[Mapping[str, Any], ...]]


def user_path() -> Path | None:
    """Returns where a user's own figures are kept, whether the file is there or not; None when switched off.

    MEMC_CALIBRATION names the file or is ``off``; without it the file is memc/measured.yaml in XDG_CONFIG_HOME.
    """
    named = os.environ.get(SWITCH)
    if named is not None:
        return None if named.strip().casefold() in _OFF else Path(named)
    given = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        home = Path(given) if given else Path("~/.config").expanduser()
    except RuntimeError:  # a user without a home
        return None
    return home / "memc" / "measured.yaml" if home.is_absolute() else None


def read_measured(path: Path, *, name: str = "") -> MeasuredFile:
    """Returns what a file of measured figures holds.

    Args:
        path: The file.
        name: What to call it in an error; its path when empty.

    Raises:
        MemcError: ``measured-file-missing``, ``measured-file-unreadable`` or ``measured-file-malformed``; also
            ``fact-file-malformed`` and ``fact-unsourced``, as every file of facts.
    """
    name = name or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = "memc probe --output writes such a file"
        where = Location(file=name)
        raise usage_error("measured-file-missing", f"{name} is not there", where=where, hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error("measured-file-unreadable", f"{name} cannot be read: {error}") from error
    document = parse_spec(text, name=name)
    if document.get("schema") != SCHEMA:
        found = f"says schema {document['schema']!r}" if "schema" in document else "names no schema"
        raise _malformed(name, "", f"{found}; figures are read from {SCHEMA!r}")
    cards, measurements = {}, {}
    for key, card in _mapping(document.get("cards"), name, "cards").items():
        place = f"cards.{key}"
        card = _mapping(card, name, place)
        cards[str(key)] = figures_in(card.get("figures"), name, f"{place}.figures")
        measurements[str(key)] = _measurements(card.get("measurements"), name, f"{place}.measurements")
    host = _mapping(document.get("host"), name, "host")
    return MeasuredFile(
        source=str(document["source"]),
        checked=str(document["checked"]),
        cards=cards,
        host=figures_in(host.get("figures"), name, "host.figures"),
        measurements=measurements,
    )


def write_measured(document: Mapping[str, Any], path: Path, heading: str) -> None:
    """Writes a file of figures: the old one or the new one is there, never half of one.

    Raises:
        MemcError: ``measured-file-unwritable``.
    """
    text = f"# {heading}\n" + yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=120)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink(missing_ok=True)
        raise usage_error(
            "measured-file-unwritable",
            f"{path} cannot be written: {error.strerror or error}",
            where=Location(file=str(path)),
            hint="name another file with --output",
        ) from error


def figure_of(values: Iterable[float]) -> MeasuredFigure:
    """Returns median, smallest, largest and number of some values, of which there is at least one."""
    from statistics import median  # slow to load, and few plans read what was measured

    found = sorted(values)
    return MeasuredFigure(median=median(found), minimum=found[0], maximum=found[-1], count=len(found))


def figures_of(measurements: Iterable[Mapping[str, Any]]) -> dict[str, MeasuredFigure]:
    """Returns every figure over the single measurements of one card, in the order of `FIGURES`."""
    values: dict[str, list[float]] = {}
    for measurement in measurements:
        for name, value in measurement["figures"].items():
            values.setdefault(name, []).append(float(value))
    return {name: figure_of(values[name]) for name in FIGURES if name in values}


def figures_document(figures: Mapping[str, MeasuredFigure]) -> dict[str, dict[str, float]]:
    """Returns figures as they stand in a file and in a lock; whole numbers where nothing is lost."""
    return {
        name: {
            "median": _short(figure.median),
            "minimum": _short(figure.minimum),
            "maximum": _short(figure.maximum),
            "count": figure.count,
        }
        for name, figure in figures.items()
    }


def _short(value: float) -> float:
    """Returns a value with six digits where it is a fraction, and whole where it is large."""
    return round(value) if abs(value) >= 1e6 or value == int(value) else round(value, 6)


def figures_in(value: Any, name: str, place: str) -> dict[str, MeasuredFigure]:
    """Returns the figures that a mapping holds.

    Args:
        value: Name → median, minimum, maximum, count; None stands for none.
        name: The file's, for an error.
        place: Where in it.

    Raises:
        MemcError: ``measured-file-malformed``.
    """
    found = {}
    for key, record in _mapping(value, name, place).items():
        if key not in FIGURES:
            close = nearest(str(key), FIGURES)
            guess = f"; nearest: {', '.join(close)}" if close else ""
            raise _malformed(name, place, f"no figure is called {key!r}{guess}")
        found[str(key)] = _figure(_mapping(record, name, f"{place}.{key}"), name, f"{place}.{key}")
    return found


def _figure(record: Mapping[str, Any], name: str, place: str) -> MeasuredFigure:
    parts = ("median", "minimum", "maximum", "count")
    if missing := [part for part in parts if part not in record]:
        raise _malformed(name, place, f"lacks {', '.join(missing)}")
    for part in parts:
        value = record[part]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise _malformed(name, place, f"{part} is {value!r}, which is no positive number")
    figure = MeasuredFigure(
        median=float(record["median"]),
        minimum=float(record["minimum"]),
        maximum=float(record["maximum"]),
        count=int(record["count"]),
    )
    if not figure.minimum <= figure.median <= figure.maximum:
        raise _malformed(name, place, "minimum, median and maximum are not in order")
    return figure


def _measurements(value: Any, name: str, place: str) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _malformed(name, place, "must hold a list")
    for number, item in enumerate(value):
        record = _mapping(item, name, f"{place}[{number}]")
        if not isinstance(record.get("id"), str):
            raise _malformed(name, f"{place}[{number}]", "a measurement has no id")
        for key, figure in _mapping(record.get("figures"), name, f"{place}[{number}].figures").items():
            if key not in FIGURES or isinstance(figure, bool) or not isinstance(figure, int | float):
                raise _malformed(name, f"{place}[{number}].figures", f"{key}: {figure!r} is no figure")
    return tuple(value)


def _mapping(value: Any, name: str, place: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _malformed(name, place, "must hold a mapping")
    return value


def _malformed(name: str, place: str, what: str) -> MemcError:
    return usage_error(
        "measured-file-malformed",
        f"{name}: {what}",
        where=Location(file=name, field=place),
        hint="memc calibrate and memc probe write such files; docs/concepts/calibration.md shows one",
    )
