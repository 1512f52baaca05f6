"""The clock's rates of a card, also of one whose speed nobody knows: its plans are ordered then, and not timed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from memc.clock.constants import ClockFacts, clock_facts
from memc.config import Precision
from memc.errors import MemcError
from memc.facts import GpuFacts, gpu_rows

_BANDWIDTH = "memory_gb_per_second"
_PEAK = "peak_tflops."


def rates_of(
    gpu: GpuFacts,
    precision: Precision,
    world_size: int,
    *,
    nodes: int = 1,
    network_bytes_per_second: float | None = None,
) -> ClockFacts:
    """Returns the rates of a card; what the catalogue lacks stands in `unknown`.

    In the place of a figure that is unknown stands what the other one is worth on the catalogue's median card. The
    order of techniques follows from the ratio of the two, and hardly changes with it; seconds do, and are not said.

    Args:
        gpu: The card.
        precision, world_size, nodes, network_bytes_per_second: As `clock_facts` takes them.
    """
    unknown: list[str] = []
    while True:
        try:
            rates = clock_facts(
                gpu, precision, world_size, nodes=nodes, network_bytes_per_second=network_bytes_per_second
            )
        except MemcError as error:
            where = error.diagnostics[0].where
            field = "" if where is None else where.field
            completed = _with(gpu, field)
            if error.diagnostics[0].code != "fact-unknown" or completed is None or field in unknown:
                raise
            unknown.append(field)
            gpu = completed
        else:
            return _untimed(rates, gpu, unknown) if unknown else rates


def _untimed(rates: ClockFacts, gpu: GpuFacts, unknown: list[str]) -> ClockFacts:
    note = (
        f"the catalogue has no {' and no '.join(unknown)} of {gpu.key}: time is unknown, and what costs time is put in "
        "the order that it has on the catalogue's median card"
    )
    return replace(rates, unknown=tuple(unknown), assumptions=(note,))


def _with(gpu: GpuFacts, field: str) -> GpuFacts | None:
    """Returns a card with a stand-in for one figure; None for a figure that has none."""
    peaks, ratio = gpu.peak_flops_per_second, _median_flops_per_byte()
    if field == _BANDWIDTH:
        rate = max(peaks.values(), default=0.0)
        return replace(gpu, memory_bytes_per_second=rate / ratio if rate else _median_bandwidth())
    if field.startswith(_PEAK):
        stand_in = (gpu.memory_bytes_per_second or _median_bandwidth()) * ratio
        return replace(gpu, peak_flops_per_second={**peaks, field.removeprefix(_PEAK): stand_in})
    return None


@cache
def _median_flops_per_byte() -> float:
    ratios = [
        max(row.facts.peak_flops_per_second.values()) / row.facts.memory_bytes_per_second
        for row in gpu_rows()
        if row.facts.peak_flops_per_second and row.facts.memory_bytes_per_second
    ]
    return _middle(ratios)


@cache
def _median_bandwidth() -> float:
    return _middle([row.facts.memory_bytes_per_second for row in gpu_rows() if row.facts.memory_bytes_per_second])


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
