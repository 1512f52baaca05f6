"""The rate of matrix products that a measured step implies: the one at which the clock says the same time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import log
from statistics import median
from typing import Any

from memc.clock import Clock, clock_facts
from memc.config import Engine, Precision, TrainingConfig
from memc.errors import MemcError
from memc.facts.records import GpuFacts, ModelFacts
from memc.ledger import Estimator, ledger_facts

_HALVINGS = 60
_STEP = 1.02
_SLOWEST = 1 / 16
"""Of the rate that the catalogue leads to; what is slower still was not slowed by matrix products."""
_LEAST_SHARE = 0.5
"""Of a step's time that must be computed, for the rate to be what its time tells."""


@dataclass(frozen=True, kw_only=True)
class Implied:
    """What one step's time tells.

    Attributes:
        figure: Name of the figure.
        rate: At which the clock says the measured time, operations per second.
        products_share: How much of a small change of the rate the time follows: 1 when products are all of it.
        clock_seconds: What the clock says with the catalogue's rate.
    """

    figure: str
    rate: float
    products_share: float
    clock_seconds: float


def implied_rate(config: TrainingConfig, model: ModelFacts, gpu: GpuFacts, seconds: float) -> Implied | str:
    """Returns what a step's time tells of the rate of products, or why it tells nothing.

    Args:
        config: What ran.
        model: Of which model.
        gpu: On which card, without figures of the user's own.
        seconds: Of one optimizer step, every sample as long as can be.

    Assumes: what else a step does takes what the clock says.
    Source: the clock (`memc.clock`), solved for its rate of products by halving; time falls as the rate rises.
    """
    if config.engine is not Engine.SINGLE or config.world_size > 1 or config.context_parallel > 1:
        return "the step of several processes tells of links as well as of products"
    name = {Precision.FP16: "fp16", Precision.FP32: "tf32" if "tf32" in gpu.peak_flops_per_second else "fp32"}.get(
        config.precision, "bf16"
    )
    try:
        facts = clock_facts(gpu, config.precision, 1)
        counts = Estimator(model, ledger_facts(gpu)).counts(config)
    except MemcError as error:
        return f"no clock for it: {error.diagnostics[0].message}"

    def told(rate: float) -> float:
        return Clock(model, replace(facts, flops_per_second=rate)).step_time(config, counts).step_seconds

    priced = Clock(model, facts).step_time(config, counts)
    if priced.compute_seconds < _LEAST_SHARE * priced.step_seconds:
        return f"computing takes {priced.compute_seconds / priced.step_seconds:.0%} of the step: less than half"
    fastest = gpu.peak_flops_per_second.get(name, facts.flops_per_second / _SLOWEST)
    low, high = facts.flops_per_second * _SLOWEST, fastest
    if told(high) > seconds:
        return (
            f"a step of {seconds:.3g} s is shorter than the {told(high):.3g} s that the clock says of {name} products "
            "at their datasheet rate"
        )
    if told(low) < seconds:
        return (
            f"a step of {seconds:.3g} s is longer than the {told(low):.3g} s that products at a sixteenth of their "
            "rate would take: something else held it up"
        )
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if told(middle) > seconds else (low, middle)
    rate = (low * high) ** 0.5
    share = log(told(rate / _STEP) / told(rate * _STEP)) / (2 * log(_STEP))
    return Implied(
        figure=f"training_flops_per_second.{name}",
        rate=rate,
        products_share=share,
        clock_seconds=priced.step_seconds,
    )


def nearer(measurements: Iterable[Mapping[str, Any]], figure: str, rate: float) -> tuple[float, float]:
    """Returns the clock's median error over measured steps, with a rate and with the catalogue's.

    A step's time follows a change of the rate as far as products are its share (the first term of the series in
    logarithms).

    Args:
        measurements: As they stand in a file of figures.
        figure: Name of the rate.
        rate: Its value.
    """
    with_rate, as_published = [], []
    for item in measurements:
        told = item["conditions"]
        if figure in item["figures"] and {"products_share", "clock_seconds", "step_seconds"} <= told.keys():
            with_rate.append(abs((item["figures"][figure] / rate) ** told["products_share"] - 1))
            as_published.append(abs(told["clock_seconds"] / told["step_seconds"] - 1))
    return (median(with_rate), median(as_published)) if with_rate else (0.0, 0.0)
