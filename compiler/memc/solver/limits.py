"""What a spec limits that cannot be counted on its card: time without rates, money without a price."""

from __future__ import annotations

from memc.clock import ClockFacts
from memc.errors import Diagnostic
from memc.facts import GpuFacts
from memc.spec import LoadedSpec, Objective


def time_contradictions(loaded: LoadedSpec, gpu: GpuFacts, rates: ClockFacts) -> list[Diagnostic]:
    """Returns what of a spec cannot be held to a time that is unknown, or to money without a price."""
    spec, found = loaded.spec, []
    limit = spec.time.budget
    if rates.unknown:
        lacks = f"the catalogue has no {' and no '.join(rates.unknown)} of {gpu.key}, so the time of a run is unknown"
        asks = {"time.budget": limit is not None, "objective": spec.objective is not Objective.LOWEST_RUNG}
        found += [
            loaded.diagnostic(
                field,
                "time-unknown",
                f"{lacks}, and {field} asks for it",
                f"remove {field}: memory is planned all the same; memc gpus says which cards are timed",
            )
            for field, asked in asks.items()
            if asked
        ]
    price = spec.hardware.usd_per_gpu_hour if spec.hardware.usd_per_gpu_hour is not None else gpu.usd_per_hour
    if limit is not None and limit.usd is not None and price is None:
        found.append(
            loaded.diagnostic(
                "time.budget",
                "price-unknown",
                f"time.budget is ${limit.usd:,.2f}, and the catalogue has no price of {gpu.key}",
                "give hardware.usd_per_gpu_hour, what one GPU of yours costs in an hour",
            )
        )
    return found
