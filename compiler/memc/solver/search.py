"""The whole space: every valid set of techniques, priced and timed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from memc.clock.estimate import Clock
from memc.clock.steptime import StepTime
from memc.config import TrainingConfig
from memc.ladder import LADDER, Dimension, Technique, with_micro_batch
from memc.ledger.estimate import Estimator, Price
from memc.solver.resolve import Question


@dataclass(frozen=True, slots=True)
class Candidate:
    """One valid configuration with the techniques that lead to it.

    Attributes:
        config: The configuration.
        techniques: In order of application.
        rung: The highest rung among them; 1 without any.
        price: Its memory.
    """

    config: TrainingConfig
    techniques: tuple[Technique, ...]
    rung: int
    price: Price


class Machine:
    """Estimator and clock of one question, and the order of its ladder."""

    def __init__(self, question: Question, estimator: Estimator, clock: Clock) -> None:
        self.question = question
        self.estimator = estimator
        self.clock = clock
        self._times: dict[TrainingConfig, StepTime] = {}
        self.rungs, self.order_note = ladder_order(question, estimator, clock)

    def time(self, config: TrainingConfig) -> StepTime:
        """Returns the time of one step and of the run; each configuration is timed once."""
        if config not in self._times:
            self._times[config] = self.clock.step_time(
                config,
                self.estimator.counts(config),
                total_steps=self.total_steps(config),
                length_share=self.question.length_share,
                usd_per_gpu_hour=self.question.budget.usd_per_gpu_hour,
            )
        return self._times[config]

    def total_steps(self, config: TrainingConfig) -> int | None:
        """Returns the optimizer steps of the run; None when the amount of data is unknown."""
        training = self.question.loaded.spec.training
        if training.max_steps:
            return training.max_steps
        if self.question.samples is None or training.epochs is None:
            return None
        per_epoch = math.ceil(self.question.samples / config.global_batch_size)
        return max(1, math.ceil(per_epoch * training.epochs))

    def fits(self, price: Price) -> bool:
        """Whether GPU and host stay within the budget."""
        budget = self.question.budget
        host_ok = budget.host_bytes is None or price.host_required_bytes <= budget.host_bytes
        return price.gpu_required_bytes <= budget.gpu_bytes and host_ok

    def in_time(self, time: StepTime) -> bool:
        """Whether the run stays within the time or money budget (an unknown length does)."""
        budget = self.question.budget
        if budget.seconds is not None and time.total_seconds is not None and time.total_seconds > budget.seconds:
            return False
        return not (budget.usd is not None and time.total_usd is not None and time.total_usd > budget.usd)

    def candidates(self) -> list[Candidate]:
        """Returns every valid configuration that has the required techniques."""
        required = self.question.required
        found = []
        for config, used in _combinations(self.question):
            names = {technique.name for technique in used}
            if required <= names:
                rung = max((self.rungs[name] for name in names), default=1)
                found.append(Candidate(config, used, rung, self.estimator.price(config)))
        return found


def _combinations(question: Question) -> Iterator[tuple[TrainingConfig, tuple[Technique, ...]]]:
    """Yields every configuration that techniques lead to, one technique per dimension at most."""
    options = {
        dimension: [
            technique
            for technique in LADDER
            if technique.dimension is dimension
            and technique.name not in question.forbidden
            and dimension not in question.frozen
        ]
        for dimension in Dimension
    }
    order = list(Dimension)

    def extend(
        config: TrainingConfig, used: tuple[Technique, ...], depth: int
    ) -> Iterator[tuple[TrainingConfig, tuple[Technique, ...]]]:
        if depth == len(order):
            yield config, used
            return
        yield from extend(config, used, depth + 1)
        for technique in options[order[depth]]:
            if technique.why_not(config, question.situation) is None:
                yield from extend(technique.apply(config, question.situation), (*used, technique), depth + 1)

    yield from extend(question.asked, (), 0)


def ladder_order(question: Question, estimator: Estimator, clock: Clock) -> tuple[dict[str, int], str]:
    """Returns the rung of each technique on this hardware, and a sentence when it differs from that of one card.

    On several cards sharding stands where its price puts it: before the first of checkpointing and optimizer offload
    that costs more time than it does. Everything else keeps the order of one card.
    """
    groups = sorted({technique.rung for technique in LADDER})
    moved: list[str] = []
    if question.asked.world_size > 1:
        cost = {name: _price(question, estimator, clock, name) for name in _COMPARED}
        rung = {technique.name: technique.rung for technique in LADDER}
        for name in ("zero-2", "zero-3"):
            for other in ("checkpoint-every-layer", "offload-optimizer"):
                ours, theirs = cost[name], cost[other]
                if ours is None or theirs is None or ours > theirs or rung[name] < rung[other]:
                    continue
                groups.remove(rung[name])
                groups.insert(groups.index(rung[other]), rung[name])
                moved.append(f"{name} (x{ours:.2f}) before {other} (x{theirs:.2f})")
                break
    place = {group: index + 2 for index, group in enumerate(groups)}
    note = "on this hardware: " + ", ".join(moved) if moved else ""
    return {technique.name: place[technique.rung] for technique in LADDER}, note


_COMPARED = ("zero-2", "zero-3", "checkpoint-every-layer", "offload-optimizer")


def _price(question: Question, estimator: Estimator, clock: Clock, name: str) -> float | None:
    """Returns step time with a technique over step time without, at a micro-batch of one; None if invalid."""
    technique = next(technique for technique in LADDER if technique.name == name)
    config, situation = question.asked, question.situation
    if Dimension.MICRO_BATCH not in question.frozen:
        config = with_micro_batch(config, 1)
    if technique.why_not(config, situation) is not None:
        return None
    counts = estimator.counts(config)
    with_it = technique.apply(config, situation)
    after = clock.step_time(with_it, estimator.counts(with_it)).step_seconds
    return after / clock.step_time(config, counts).step_seconds
