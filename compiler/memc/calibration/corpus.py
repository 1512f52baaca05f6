"""Measurements in files: collections in the form of the published ones, and what `memc probe` wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from memc.calibration.configs import config_of
from memc.calibration.rates import implied_rate
from memc.calibration.records import LeftOut, Measurement, digest_of
from memc.errors import Location, MemcError, usage_error
from memc.facts import GpuFacts, load_gpu, load_model
from memc.facts.measured import SCHEMA, read_measured

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_VERSION = re.compile(r"(\w[\w-]*) (\d[\w.+]*)")


def read(paths: Iterable[Path]) -> Iterator[Measurement | LeftOut]:
    """Yields what files hold; records of memory and of time with one id, in whatever file, are one measurement.

    Raises:
        MemcError: ``calibrate-file-unreadable`` for a file of neither form.
    """
    records: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in paths:
        document = _document(path)
        if isinstance(document, dict) and document.get("schema") == SCHEMA:
            yield from _probed(path)
        elif isinstance(document, list) and all(isinstance(item, dict) and "id" in item for item in document):
            for item in document:
                place, known = records.get(str(item["id"]), (f"{path}, {item['id']}", {}))
                told = {name: value for name, value in known.items() if value is not None}
                records[str(item["id"])] = (place, {**item, **told})
        else:
            raise _unreadable(path, "it holds neither records with an id nor figures of memc probe")
    for place, record in records.values():
        yield _measurement(place, record)


def _measurement(place: str, record: Mapping[str, Any]) -> Measurement | LeftOut:
    """Returns one record of a collection as a measurement, or why it is not used."""
    if record.get("source_kind", "measured") != "measured" or record.get("confidence") == "low":
        return LeftOut(place=place, reason=f"nothing was measured ({record.get('source_kind', 'low confidence')})")
    try:
        gpu = load_gpu(str(record.get("gpu")))
    except MemcError as error:
        return LeftOut(place=place, reason=error.diagnostics[0].message)
    try:
        figures = _memory(record)
        told = _time(figures, record, gpu)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return LeftOut(place=place, reason=f"it cannot be read: {error!r}")
    if not figures:
        return LeftOut(place=place, reason="it holds neither reserved memory, a context nor a step that tells a rate")
    conditions = {
        "versions": dict(_VERSION.findall(str(record.get("versions", "")))),
        "model": record.get("model"),
        "method": record.get("method"),
        "step_seconds": record.get("step_time_s"),
        "date": record.get("date"),
        **told,
    }
    return Measurement(
        id=digest_of({"id": record["id"], "date": record.get("date"), "figures": figures}),
        card=gpu.key,
        kind="suite",
        figures=figures,
        conditions={name: value for name, value in conditions.items() if value},
    )


def _memory(record: Mapping[str, Any]) -> dict[str, float]:
    others = record.get("other_metrics") or {}
    figures: dict[str, float] = {}
    if record.get("n_gpus", 1) == 1 and others.get("context_bytes"):
        figures["context_bytes"] = float(others["context_bytes"])
    if record.get("unit") == "bytes" and others.get("peak_reserved_bytes"):
        allocated, reserved = int(record["value_raw"]), int(others["peak_reserved_bytes"])
        if not 0 < allocated <= reserved:
            raise ValueError(f"{reserved} bytes are reserved of which {allocated} are allocated")
        said = str(record.get("notes", ""))
        if "expandable_segments:" in said:
            fixed = "" if "expandable_segments:True" in said else "_fixed_segments"
            figures[f"reserved_over_allocated{fixed}"] = reserved / allocated
    return figures


def _time(figures: dict[str, float], record: Mapping[str, Any], gpu: GpuFacts) -> dict[str, Any]:
    """Adds the rate that a step's time tells; returns how it was told, or why it tells none."""
    seconds = record.get("step_time_s")
    if not seconds:
        return {"no_rate": "no step was timed"}
    if not isinstance(record.get("settings"), dict):
        return {"no_rate": "a record without its settings tells no rate"}
    try:
        model = load_model(str(record["model"]), base_dir=Path())
    except MemcError as error:
        return {"no_rate": error.diagnostics[0].message}
    found = implied_rate(config_of(record["settings"]), model, gpu, float(seconds))
    if isinstance(found, str):
        return {"no_rate": found}
    figures[found.figure] = found.rate
    return {"products_share": round(found.products_share, 4), "clock_seconds": round(found.clock_seconds, 6)}


def _probed(path: Path) -> Iterator[Measurement | LeftOut]:
    """Yields the rates of each card in a file of `memc probe`, those of the host with them."""
    found = read_measured(path)
    if not found.cards:
        yield LeftOut(place=str(path), reason="it is of a machine without a GPU: name it in a spec, as hardware.file")
    for card, figures in found.cards.items():
        taken = {name: figure.median for name, figure in {**found.host, **figures}.items()}
        if found.measurements[card]:
            yield LeftOut(place=str(path), reason=f"it is what memc calibrate wrote of {card}: give --output to merge")
            continue
        yield Measurement(
            id=digest_of({"card": card, "figures": taken, "checked": found.checked}),
            card=card,
            kind="probe",
            figures=taken,
            conditions={"versions": dict(_VERSION.findall(found.source)), "date": found.checked},
        )


def _document(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _unreadable(path, f"it cannot be read: {' '.join(str(error).split())}") from error


def _unreadable(path: Path, why: str) -> MemcError:
    return usage_error(
        "calibrate-file-unreadable",
        f"{path}: {why}",
        where=Location(file=str(path)),
        hint="name folders that memc compile wrote, collections of measurements, or files of memc probe",
    )
