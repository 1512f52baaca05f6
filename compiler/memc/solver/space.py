"""The whole space: every valid configuration as a frame (who trains, where states lie) and a shape (how a pass runs).

A frame is a choice of method, states, sharding and offload; a shape is a choice of loss head, checkpointing and
micro-batch. Techniques of the two do not look at each other beyond what the frame already says, so the space is their
product and is never written out: memory is a sum of parts that belong to a frame, or to a frame's few settings and a
shape. Each part is built once, and what a bound decides is not priced at all:

- what a frame holds beside the tokens of a pass is a lower bound of all its configurations;
- with accumulation, memory grows with the micro-batch: below one that does not fit nothing larger has to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memc.ladder import Technique
from memc.solver.enumeration import SHAPE_DIMENSIONS
from memc.solver.frames import Candidate, Frame, Line, Shape
from memc.solver.resolve import Question


class Space:
    """Every valid configuration of a question that has the required techniques.

    Attributes:
        frames: All of them, in order of enumeration.
        considered: Number of configurations. Every one of them is decided: priced, or ruled out by one of the bounds
            above, or passed over because what stands on a lower rung suffices.
        rungs: The rungs that have configurations, ascending.
    """

    def __init__(self, question: Question, frames: list[Frame]) -> None:
        self.question = question
        self.frames = frames
        self.considered = sum(frame.count for frame in self.frames)
        self.rungs = sorted({max(frame.rung, line.rung) for frame in self.frames for line in frame.lines})
        self._fitting: dict[tuple[int, int], int] = {}

    def pairs(self, rung: int | None = None) -> Iterator[tuple[Frame, Line]]:
        """Yields every frame with each of its lines; of one rung alone when that is given."""
        for frame in self.frames:
            if rung is None or frame.rung <= rung:
                for line in frame.lines:
                    if rung is None or max(frame.rung, line.rung) == rung:
                        yield frame, line

    def fitting(self, rung: int | None = None) -> Iterator[tuple[Frame, Shape]]:
        """Yields what stays within memory, host and drive."""
        for frame, line in self.pairs(rung):
            for shape in line.shapes[: self.fitting_shapes(frame, line)]:
                yield frame, shape

    def fitting_shapes(self, frame: Frame, line: Line) -> int:
        """Returns how many shapes of a line fit: the first ones, since memory never falls along it."""
        key = (id(frame), id(line))
        found = self._fitting.get(key)
        if found is None:
            found = self._fitting[key] = self._fit(frame, line)
        return found

    def least_memory(self, rung: int | None = None) -> tuple[Frame, Shape] | None:
        """Returns what is nearest to the budget: least above it over all resources, then least memory of the card."""
        return self.nearest((frame, line.shapes[0]) for frame, line in self.pairs(rung))

    def nearest(self, pairs: Iterable[tuple[Frame, Shape]]) -> tuple[Frame, Shape] | None:
        """Returns what is nearest to the budget among some configurations, the first of equals; None of none.

        They are looked at by rising lower bound, until that is above the nearest that was found.
        """
        budget = self.question.budget
        bounds = []
        for index, (frame, shape) in enumerate(pairs):
            bound = frame.bound(shape)
            bounds.append(((bound.over(budget), bound.gpu), index, frame, shape))
        best: tuple[tuple[int, int], int, Frame, Shape] | None = None
        for bound_key, index, frame, shape in sorted(bounds, key=lambda item: item[:2]):
            if best is not None and bound_key > best[0]:
                break
            totals = frame.totals(shape)
            found = ((totals.over(budget), totals.gpu), index, frame, shape)
            if best is None or found[:2] < best[:2]:
                best = found
        return None if best is None else best[2:]

    def one_step_from(self, techniques: tuple[Technique, ...], rung: int) -> tuple[Frame, Shape] | None:
        """Returns what stands on a rung and differs least from a configuration; None where nothing is near.

        Near is what keeps the frame or the shape. Of equals it is what holds least beside the tokens of a pass, then
        what stands last on the ladder.

        Args:
            techniques: Those of the configuration.
            rung: The rung.
        """
        names = frozenset(technique.name for technique in techniques)
        kept = frozenset(technique.name for technique in techniques if technique.dimension in SHAPE_DIMENSIONS)
        budget, found = self.question.budget, []
        for index, (frame, line) in enumerate(self.pairs(rung)):
            own = frame.names == names - kept
            found += [
                (len(names ^ (frame.names | shape.names)), -index, frame, shape)
                for shape in line.shapes
                if own or shape.names == kept
            ]
        if not found:
            return None
        least = min(item[0] for item in found)
        near = [item for item in found if item[0] == least]

        def key(item: tuple[int, int, Frame, Shape]) -> tuple[int, int, int]:
            bound = item[2].bound(item[3])
            return bound.over(budget), bound.gpu, item[1]

        return min(near, key=key)[2:]

    def find(self, names: frozenset[str]) -> Candidate | None:
        """Returns the configuration that has exactly these techniques; None when there is none."""
        for frame in self.frames:
            if frame.names <= names:
                rest = names - frame.names
                for line in frame.lines:
                    for shape in line.shapes:
                        if shape.names == rest:
                            return frame.candidate(shape)
        return None

    def candidates(self) -> list[Candidate]:
        """Returns all configurations, each with its price."""
        return [frame.candidate(shape) for frame, line in self.pairs() for shape in line.shapes]

    def _fit(self, frame: Frame, line: Line) -> int:
        budget, shapes = self.question.budget, line.shapes

        def fits(shape: Shape) -> bool:
            return frame.may_fit(shape, budget) and frame.totals(shape).within(budget)

        if not fits(shapes[0]):
            return 0
        if fits(shapes[-1]):
            return len(shapes)
        low, high = 1, len(shapes) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if fits(shapes[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low
