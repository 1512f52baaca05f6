"""Configurations that fit with their time, the fastest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from memc.clock import StepTime
from memc.config import TrainingConfig
from memc.plan import Budget
from memc.solver.frames import Candidate, Frame, Line, Shape
from memc.solver.search import Machine


@dataclass(frozen=True, slots=True)
class Timed:
    """A configuration that fits, with its time."""

    frame: Frame
    shape: Shape
    time: StepTime

    @property
    def config(self) -> TrainingConfig:
        """The configuration."""
        return self.frame.with_shape(self.shape)

    @property
    def candidate(self) -> Candidate:
        """The configuration with its techniques and its price."""
        return self.frame.candidate(self.shape)

    @property
    def seconds_per_sample(self) -> float:
        """Step time over the samples of the step."""
        return self.time.step_seconds / self.config.global_batch_size


class _Open:
    """A line of a frame, and the smallest micro-batch of it that was seen not to fit: no larger one does then."""

    __slots__ = ("frame", "too_large")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.too_large: int | None = None

    def may_fit(self, shape: Shape) -> bool:
        """Whether nothing that was seen rules a shape out."""
        return self.too_large is None or shape.changes["micro_batch_size"] < self.too_large

    def fits(self, shape: Shape, budget: Budget) -> bool:
        """Whether a shape fits."""
        if not self.may_fit(shape):
            return False
        fits = self.frame.may_fit(shape, budget) and self.frame.totals(shape).within(budget)
        if not fits:
            self.too_large = shape.changes["micro_batch_size"]
        return fits


def fitting_by_time(machine: Machine, pairs: Iterable[tuple[Frame, Line]], *, in_time: bool = True) -> Iterator[Timed]:
    """Yields what fits of some lines, by rising seconds per sample.

    What could be fastest is looked at first. A line stands by a lower bound of its time until it comes first; then its
    shapes stand by their own bounds, those by their time, and what comes first with its time is asked for its memory.
    Who stops early leaves most of a space without a price.

    Args:
        machine: The priced question.
        pairs: Frames with their lines.
        in_time: Whether what misses the time budget is left out.
    """
    budget, order = machine.question.budget, count()
    queue: list[tuple[float, int, _Open, Line | Shape | Timed]] = []
    for frame, line in pairs:
        if frame.bound(line.shapes[0]).within(budget):
            least = min([machine.least_seconds(frame, shape) for shape in line.shapes])
            queue.append((least, next(order), _Open(frame), line))
    heapify(queue)
    while queue:
        _, number, at, item = heappop(queue)
        if isinstance(item, Timed):
            if at.fits(item.shape, budget):
                yield item
        elif isinstance(item, Line):
            if at.fits(item.shapes[0], budget):
                for shape in item.shapes:
                    heappush(queue, (machine.least_seconds(at.frame, shape), next(order), at, shape))
        elif at.may_fit(item):
            timed = Timed(at.frame, item, machine.time(at.frame.with_shape(item)))
            if not in_time or machine.in_time(timed.time):
                heappush(queue, (timed.seconds_per_sample, number, at, timed))
