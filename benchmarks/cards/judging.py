"""Ledger and clock held against what a card measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from memc.clock.constants import clock_facts
from memc.clock.estimate import Clock
from memc.config import Precision, TrainingConfig
from memc.facts import load_gpu
from memc.ledger import Estimator, Ledger, Moment, Phase, ledger_facts

from cards.cases import Case, facts_of

GPU = "h200-sxm-141gb"
_STEP = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.STEP)


@dataclass(frozen=True, kw_only=True)
class Held:
    """One measured case beside its predictions; measured figures are None where the case ran out of memory.

    Attributes:
        case: Which.
        allocated_bytes, reserved_bytes: Largest over the measured steps.
        priced_allocated_bytes, priced_reserved_bytes: The ledger's.
        phases: Measured and priced allocated peak by phase: forward and loss together, backward, step.
        context_bytes: Measured, outside the allocator.
        seconds: Median step.
        priced_seconds: The clock's.
        phase_seconds: Measured by phase.
        fits: Whether the case ran.
        priced_fits: Whether the ledger says so of the card.
    """

    case: Case
    allocated_bytes: int | None
    reserved_bytes: int | None
    priced_allocated_bytes: int
    priced_reserved_bytes: int
    phases: Mapping[str, tuple[int, int]]
    context_bytes: int | None
    seconds: float | None
    priced_seconds: float
    phase_seconds: Mapping[str, float]
    fits: bool
    priced_fits: bool

    @property
    def errors(self) -> dict[str, float]:
        """Signed relative errors, priced over measured less one, of what was measured."""
        pairs = {
            "allocated": (self.priced_allocated_bytes, self.allocated_bytes),
            "reserved": (self.priced_reserved_bytes, self.reserved_bytes),
            "seconds": (self.priced_seconds, self.seconds),
        }
        return {name: priced / found - 1 for name, (priced, found) in pairs.items() if found}


def hold(case: Case, record: Mapping[str, Any]) -> Held:
    """Returns a measured case beside ledger and clock.

    Args:
        case: Its configuration.
        record: What was measured of it (`cards.corpus.results`).
    """
    ledger = priced(case.model, case.config)
    gpu = ledger.gpu
    ran = record["kind"] == "measured"
    peaks: Mapping[str, Mapping[str, int]] = record.get("peaks", {})
    by_phase = _by_phase(ledger)
    capacity = load_gpu(GPU).capacity_bytes
    assert capacity is not None
    return Held(
        case=case,
        allocated_bytes=max((peak["allocated"] for peak in peaks.values()), default=None),
        reserved_bytes=max((peak["reserved"] for peak in peaks.values()), default=None),
        priced_allocated_bytes=max(by_phase.values()),
        priced_reserved_bytes=max(by_phase.values()) + gpu.reserved_above_allocated_bytes,
        phases={phase: (peaks[phase]["allocated"], by_phase[phase]) for phase in peaks},
        context_bytes=record.get("context_bytes"),
        seconds=record.get("median_step_seconds"),
        priced_seconds=seconds(case.model, case.config),
        phase_seconds=record.get("phase_seconds", {}),
        fits=ran,
        priced_fits=gpu.required_bytes <= capacity,
    )


def priced(model: str, config: TrainingConfig) -> Ledger:
    """Returns the ledger of a configuration on the card."""
    return _estimator(model, config.classes).ledger(config)


def seconds(model: str, config: TrainingConfig) -> float:
    """Returns the clock's seconds of a step on the card."""
    counts = _estimator(model, config.classes).counts(config)
    return _clock(model, config.classes).step_time(config, counts).step_seconds


def parts(model: str, config: TrainingConfig) -> dict[str, float]:
    """Returns the clock's seconds of a micro-batch by kind of work."""
    clock = _clock(model, config.classes)
    work = clock.micro_batch(config)
    return {
        "forward products": work.forward,
        "backward products": work.backward,
        "memory": work.bandwidth,
        "launch": work.forward_launch + work.backward_launch,
    }


def _by_phase(ledger: Ledger) -> dict[str, int]:
    found: dict[str, int] = {}
    for moment in Moment:
        if moment.phase in _STEP:
            phase = "forward" if moment.phase is Phase.LOSS else moment.phase.value
            found[phase] = max(found.get(phase, 0), ledger.gpu.by_moment[moment])
    return found


@cache
def _estimator(model: str, classes: int) -> Estimator:
    return Estimator(facts_of(model, classes), ledger_facts(load_gpu(GPU)))


@cache
def _clock(model: str, classes: int) -> Clock:
    return Clock(facts_of(model, classes), clock_facts(load_gpu(GPU), Precision.BF16, 1))


def held(cases: Iterable[Case], records: Mapping[str, Mapping[str, Any]]) -> list[Held]:
    """Returns all cases that were measured or ran out of memory, in order; those that say why not are left out."""
    judged = ("measured", "oom")
    known = [(case, records[case.name]) for case in cases if case.name in records]
    return [hold(case, record) for case, record in known if record["kind"] in judged and not record["not_compared"]]


def left_out(records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns why a record is not compared, by name of the case, of those that say so."""
    return {name: record["not_compared"] for name, record in records.items() if record["not_compared"]}
