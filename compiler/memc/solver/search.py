"""One question with what prices and times it: the machine of the solver, and the order of its ladder."""

from __future__ import annotations

import math

from memc.clock.estimate import Clock, PassTable, RunLength
from memc.clock.steptime import StepTime
from memc.config import TrainingConfig
from memc.ladder import LADDER, Dimension, with_micro_batch
from memc.ledger.estimate import Estimator
from memc.solver.frames import Candidate, Frame, Shape
from memc.solver.kept import Kept
from memc.solver.resolve import Question
from memc.solver.space import Space

_ROUNDING = 1 - 1e-9  # a sum of the same seconds in another order may be the least bit smaller


class Machine:
    """Estimator and clock of one question, and the order of its ladder."""

    def __init__(self, question: Question, estimator: Estimator, clock: Clock, kept: Kept | None = None) -> None:
        self.question = question
        self.kept = Kept() if kept is None else kept
        self.estimator = estimator
        self.clock = clock
        self._times: dict[int, tuple[TrainingConfig, StepTime]] = {}
        self._passes: dict[int, tuple[Frame, PassTable, int]] = {}
        self._space: Space | None = None
        self.rungs, self.order_note = ladder_order(question, estimator, clock)

    def space(self) -> Space:
        """Returns every valid configuration; made when first asked for."""
        if self._space is None:
            frames = self.kept.frames(self.question, self.estimator, self.rungs)
            self._space = Space(self.question, frames)
        return self._space

    def time(self, config: TrainingConfig) -> StepTime:
        """Returns the time of one step and of the run; each record is timed once."""
        known = self._times.get(id(config))
        if known is None:
            time = self.clock.step_time(
                config,
                self.estimator.counts(config),
                run=self.run_length(config),
                length_share=self.question.length_share,
                usd_per_gpu_hour=self.question.budget.usd_per_gpu_hour,
            )
            known = self._times[id(config)] = config, time  # the record stays alive, so that its id stays its own
        return known[1]

    def least_seconds(self, frame: Frame, shape: Shape) -> float:
        """Returns a lower bound of the seconds per sample of a configuration: its passes, without what it waits for."""
        known = self._passes.get(id(frame))
        if known is None:
            config = frame.config
            known = self._passes[id(frame)] = frame, self.clock.pass_table(config), config.data_parallel_ranks
        _, table, ranks = known
        work = table.get(shape.pass_key)
        if work is None:
            work = self.clock.micro_batch(frame.with_shape(shape))
        samples: int = shape.changes["micro_batch_size"] * shape.passes * ranks
        return shape.passes * work.seconds / samples * _ROUNDING

    def run_length(self, config: TrainingConfig) -> RunLength | None:
        """Returns the steps and saves of the run; None when the amount of data is unknown.

        A run that is not told how often saves and evaluates once per epoch. Evaluation takes no time here when its
        samples are unknown.
        """
        steps, spec = self.total_steps(config), self.question.loaded.spec
        if steps is None:
            return None
        evaluates = spec.data.eval is not None and bool(self.question.evaluation_samples)
        return RunLength(
            steps=steps,
            saves=_times(steps, spec.training.save_steps, spec.training.epochs),
            evaluations=_times(steps, spec.training.eval_steps, spec.training.epochs) if evaluates else 0,
            evaluation_samples=self.question.evaluation_samples or 0,
            samples=self.question.given_samples or 0,
        )

    def total_steps(self, config: TrainingConfig) -> int | None:
        """Returns the optimizer steps of the run; None when the amount of data is unknown."""
        training = self.question.loaded.spec.training
        if training.max_steps:
            return training.max_steps
        if self.question.samples is None or training.epochs is None:
            return None
        per_epoch = math.ceil(self.question.samples / config.global_batch_size)
        return max(1, math.ceil(per_epoch * training.epochs))

    def fits(self, candidate: Candidate) -> bool:
        """Whether card, host and drive stay within the budget."""
        return candidate.needs.within(self.question.budget)

    def in_time(self, time: StepTime) -> bool:
        """Whether the run stays within the time or money budget (an unknown length does)."""
        budget = self.question.budget
        if budget.seconds is not None and time.total_seconds is not None and time.total_seconds > budget.seconds:
            return False
        return not (budget.usd is not None and time.total_usd is not None and time.total_usd > budget.usd)


def _times(steps: int, every: int | None, epochs: float | None) -> int:
    """Returns how often something happens that happens every so many steps; once per epoch when that is not said."""
    if every is None:
        return max(1, math.ceil(epochs or 1))
    return steps // every if every else 0


def ladder_order(question: Question, estimator: Estimator, clock: Clock) -> tuple[dict[str, int], str]:
    """Returns the rung of each technique on this hardware, and a sentence when it differs from that of one card.

    On several cards sharding stands where its price puts it: before the first of checkpointing and optimizer offload
    that costs more time than it does. A smaller micro-batch is free only while the card stays busy: one that costs
    more than recomputing every layer (a routed model reads its experts, a 4-bit base its codes once per micro-batch)
    stands behind that. Everything else keeps the order of one card.
    """
    rung = {technique.name: technique.rung for technique in LADDER}
    groups = sorted(set(rung.values()))
    moved: list[str] = []
    if question.asked.world_size > 1:
        moved += _shard_early(groups, rung, {name: _price(question, estimator, clock, name) for name in _COMPARED})
    dear = _dear_accumulation(question, estimator, clock)
    place = {group: 2 + index for index, group in enumerate(groups)}
    if dear:
        behind = place[rung[_RECOMPUTE]]
        place = {group: at + (at > behind) for group, at in place.items()}
        moved.append(f"{_RECOMPUTE} before {next(iter(dear))} (x{next(iter(dear.values())):.2f} the time)")
    rungs = {name: place[group] for name, group in rung.items()}
    rungs |= dict.fromkeys(dear, place[rung[_RECOMPUTE]] + 1)
    return rungs, "on this hardware: " + ", ".join(moved) if moved else ""


_RECOMPUTE = "checkpoint-every-layer"
_COMPARED = ("zero-2", "zero-3", _RECOMPUTE, "offload-optimizer")


def _shard_early(groups: list[int], rung: dict[str, int], cost: dict[str, float | None]) -> list[str]:
    """Moves the rungs of sharding to where their price puts them, and returns what moved, in words."""
    moved = []
    for name in ("zero-2", "zero-3"):
        for other in (_RECOMPUTE, "offload-optimizer"):
            ours, theirs = cost[name], cost[other]
            if ours is None or theirs is None or ours > theirs or rung[name] < rung[other]:
                continue
            groups.remove(rung[name])
            groups.insert(groups.index(rung[other]), rung[name])
            moved.append(f"{name} (x{ours:.2f}) before {other} (x{theirs:.2f})")
            break
    return moved


def _dear_accumulation(question: Question, estimator: Estimator, clock: Clock) -> dict[str, float]:
    """Returns the divisions of the micro-batch that cost more time than recomputing every layer, with their price.

    Both are laid over the configuration as asked, whose step has the same samples.
    """
    config, situation = question.asked, question.situation
    if Dimension.MICRO_BATCH in question.frozen or Dimension.CHECKPOINTING in question.frozen:
        return {}
    recompute = next(technique for technique in LADDER if technique.name == _RECOMPUTE)
    if recompute.why_not(config, situation) is not None:
        return {}
    counts = estimator.counts(config)
    asked = clock.step_time(config, counts).step_seconds
    limit = clock.step_time(recompute.apply(config, situation), counts).step_seconds
    dear = {}
    for technique in LADDER:
        if technique.dimension is Dimension.MICRO_BATCH and technique.why_not(config, situation) is None:
            seconds = clock.step_time(technique.apply(config, situation), counts).step_seconds
            if seconds > limit:
                dear[technique.name] = seconds / asked
    return dear


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
