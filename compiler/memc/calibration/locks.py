"""Measurements in the locks of folders: what `memc verify` measured of a plan on a card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memc import driver
from memc.calibration.configs import config_of
from memc.calibration.rates import implied_rate
from memc.calibration.records import LeftOut, Measurement, digest_of
from memc.config import TrainingConfig
from memc.document import LOCK_SCHEMA, lock_digest
from memc.errors import Location, MemcError, usage_error
from memc.facts import GpuFacts, ModelFacts, load_gpu
from memc.ledger.entries import Grade
from memc.spec import load_spec

_KEPT = ("driver", "versions", "steps", "world_size", "random_weights")


def read(folder: Path) -> Iterator[Measurement | LeftOut]:
    """Yields every measurement of a folder's lock, and why one is not used.

    Raises:
        MemcError: ``calibrate-lock-unreadable`` when the lock is no lock of memc's.
    """
    path = folder / driver.LOCK_NAME
    lock = _lock(path)
    measurements = lock.get("measurements")
    if not isinstance(measurements, list) or not all(isinstance(item, dict) for item in measurements):
        raise _unreadable(path, "its measurements are no list of records")
    if not measurements:
        yield LeftOut(place=str(path), reason="nothing was measured: run memc verify")
    if measurements and lock.get("digest") not in (None, lock_digest(lock)):
        yield LeftOut(place=str(path), reason="the lock was edited by hand: its own digest differs")
        return
    try:
        config = config_of(lock["plan"]["settings"])
        outside = _outside_bytes(lock["ledger"]["gpu"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, f"its plan cannot be read: {error}") from error
    model = _model(folder)
    for number, record in enumerate(measurements, start=1):
        yield _measurement(f"{path}, measurement {number}", lock, record, config, model, outside)


def _measurement(
    place: str,
    lock: Mapping[str, Any],
    record: Mapping[str, Any],
    config: TrainingConfig,
    model: ModelFacts | str,
    outside_bytes: int,
) -> Measurement | LeftOut:
    """Returns one measurement of a lock, or why it is not used."""
    if record.get("grade") != Grade.MEASURED or record.get("device") != "cuda" or not record.get("judged"):
        kind = f"on {record.get('device')}" if record.get("device") != "cuda" else f"{record.get('grade')}"
        return LeftOut(place=place, reason=f"no card was measured ({kind})")
    ranks = [rank for rank in record.get("ranks") or () if isinstance(rank, dict)]
    names = sorted({str(rank.get("device_name")) for rank in ranks})
    if len(names) != 1:
        return LeftOut(place=place, reason=f"ranks ran on different cards: {', '.join(names) or 'none is named'}")
    try:
        gpu = load_gpu(names[0])
    except MemcError as error:
        return LeftOut(place=place, reason=error.diagnostics[0].message)
    try:
        figures = _memory(ranks, config, outside_bytes)
        seconds = record.get("step_seconds")
        told = _time(figures, config, model, gpu, seconds)
    except (KeyError, TypeError, ValueError) as error:
        return LeftOut(place=place, reason=f"it cannot be read: {error}")
    conditions = {name: record[name] for name in _KEPT if record.get(name) not in (None, "")}
    conditions |= {"model": lock["model"]["key"], "method": config.method.value, "step_seconds": seconds}
    conditions |= {"planned_torch": lock.get("facts", {}).get("stack.torch")}
    conditions |= told
    return Measurement(
        id=digest_of({"settings": lock["plan"]["settings"], "measurement": record}),
        card=gpu.key,
        kind="verify",
        figures=figures,
        conditions={name: value for name, value in conditions.items() if value is not None},
    )


def _memory(ranks: list[dict[str, Any]], config: TrainingConfig, outside_bytes: int) -> dict[str, float]:
    """Returns context and reserve of the rank that needs most.

    A context is told by one process alone: with several, buffers of collectives lie beside it. What others held on the
    card before the run is no part of it. Where the card's use could not be read, the lock holds the ledger's figure,
    which tells nothing.
    """
    rank = max(ranks, key=lambda item: int(item["peak_reserved_bytes"]))
    allocated, reserved = int(rank["peak_allocated_bytes"]), int(rank["peak_reserved_bytes"])
    if not 0 < allocated <= reserved:
        raise ValueError(f"{reserved} bytes are reserved of which {allocated} are allocated")
    fixed = "" if config.expandable_segments else "_fixed_segments"
    figures = {f"reserved_over_allocated{fixed}": reserved / allocated}
    outside = int(rank["required_bytes"]) - reserved
    context = outside - int(rank.get("others_bytes") or 0)
    if len(ranks) == 1 and outside != outside_bytes and context > 0:
        figures["context_bytes"] = float(context)
    return figures


def _time(
    figures: dict[str, float], config: TrainingConfig, model: ModelFacts | str, gpu: GpuFacts, seconds: Any
) -> dict[str, Any]:
    """Adds the rate that the step's time tells; returns how it was told, or why it tells none."""
    if not isinstance(seconds, int | float) or not seconds > 0:
        return {"no_rate": "no step was timed"}
    if isinstance(model, str):
        return {"no_rate": model}
    found = implied_rate(config, model, gpu, float(seconds))
    if isinstance(found, str):
        return {"no_rate": found}
    figures[found.figure] = found.rate
    return {"products_share": round(found.products_share, 4), "clock_seconds": round(found.clock_seconds, 6)}


def _model(folder: Path) -> ModelFacts | str:
    """Returns the facts of a folder's model, or why they are not to be had."""
    try:
        return driver.facts_of(load_spec(driver.spec_path_of(folder)))[1]
    except MemcError as error:
        return f"no rates without the spec's model: {error.diagnostics[0].message}"


def _outside_bytes(gpu: Mapping[str, Any]) -> int:
    return int(gpu["required_bytes"]) - int(gpu["peak_reserved_bytes"])


def _lock(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, f"it cannot be read: {error}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != LOCK_SCHEMA:
        raise _unreadable(path, f"it says schema {schema!r}, and {LOCK_SCHEMA!r} is read")
    return dict(document)


def _unreadable(path: Path, why: str) -> MemcError:
    return usage_error(
        "calibrate-lock-unreadable",
        f"{path}: {why}",
        where=Location(file=str(path)),
        hint="leave it out, or compile its spec again and run memc verify",
    )
