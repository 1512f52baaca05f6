"""The whole space: every valid configuration as a frame (who trains, where states lie) and a shape (how a pass runs).

A frame is a choice of method, states, sharding and offload; a shape is a choice of loss head, checkpointing and
micro-batch. Techniques of the two do not look at each other beyond what the frame already says, so the space is their
product and is never written out: memory is a sum of parts that belong to a frame, or to a frame's few settings and a
shape. Each part is built once, and what a bound decides is not priced at all:

- what a frame holds beside the tokens of a pass is a lower bound of all its configurations;
- with accumulation, memory grows with the micro-batch: below one that does not fit nothing larger has to be looked at.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from memc.config import TrainingConfig
from memc.ladder import LADDER, Dimension, Technique
from memc.ledger.estimate import PARTS, Estimator, Price, total
from memc.ledger.parts import Part
from memc.plan import Budget
from memc.solver.resolve import Question

SHAPE_DIMENSIONS = (
    Dimension.LOSS,
    Dimension.CHECKPOINTING,
    Dimension.CHECKPOINT_OFFLOAD,
    Dimension.MICRO_BATCH,
)
_WHOLE = tuple(kind for kind in PARTS if kind.shape is None)
_STEADY = tuple(kind for kind in PARTS if kind.shape is not None and not kind.tokens)
_TOKENS = tuple(kind for kind in PARTS if kind.shape is not None and kind.tokens)
_SHAPED = (*_STEADY, *_TOKENS)


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


@dataclass(frozen=True, slots=True)
class Shape:
    """Settings of a pass that go with every frame of one kind.

    Attributes:
        changes: Fields of the frame's configuration that it sets.
        techniques: In order of application.
        rung: The highest among them; 1 without any.
        accumulates: Whether several micro-batches make a step.
        keys: For each part that depends on the shape, the settings it depends on.
    """

    changes: dict[str, Any]
    techniques: tuple[Technique, ...]
    rung: int
    accumulates: bool
    keys: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Shapes that differ in their micro-batch alone, by rising micro-batch: memory never falls along a line."""

    shapes: tuple[Shape, ...]
    rung: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What one configuration needs, in bytes."""

    gpu: int
    host: int
    nvme: int

    def within(self, budget: Budget) -> bool:
        """Whether card, host and drive have that much."""
        return self.over(budget) == 0

    def over(self, budget: Budget) -> int:
        """Returns by how much it is above the budget, over all resources; an unknown host is not looked at."""
        gpu, nvme = max(0, self.gpu - budget.gpu_bytes), max(0, self.nvme - budget.nvme_bytes)
        host = 0 if budget.host_bytes is None else max(0, self.host - budget.host_bytes)
        return gpu + host + nvme


class Frame:
    """A configuration without shape techniques, the shapes that go with it, and what it needs with each of them.

    Attributes:
        config: The configuration.
        techniques: Those that led to it.
        names: Their names.
        rung: The highest among them.
        lines: Its shapes.
    """

    __slots__ = (
        "_bounds",
        "_configs",
        "_estimator",
        "_tables",
        "_totals",
        "_whole",
        "config",
        "lines",
        "names",
        "rung",
        "techniques",
    )

    def __init__(
        self,
        config: TrainingConfig,
        techniques: tuple[Technique, ...],
        rung: int,
        lines: tuple[Line, ...],
        estimator: Estimator,
    ) -> None:
        self.config = config
        self.techniques = techniques
        self.names = frozenset(technique.name for technique in techniques)
        self.rung = rung
        self.lines = lines
        self._estimator = estimator
        self._whole: tuple[Part, ...] | None = None
        self._bounds: dict[Hashable, Totals] = {}
        self._tables: tuple[dict[Hashable, Part], ...] = ()
        self._totals: dict[int, Totals] = {}
        self._configs: dict[int, TrainingConfig] = {}

    @property
    def count(self) -> int:
        """Number of its configurations."""
        return sum(len(line.shapes) for line in self.lines)

    def bound(self, shape: Shape) -> Totals:
        """Returns what it needs at least with a shape, the tokens of a pass left out: a lower bound of `totals`."""
        key = shape.keys[: len(_STEADY)]
        found = self._bounds.get(key)
        if found is None:
            whole = self._frame_parts()
            found = self._bounds[key] = _summed((*whole, *self._shape_parts(shape, len(_STEADY))))
        return found

    def totals(self, shape: Shape) -> Totals:
        """Returns what it needs with one of its shapes."""
        found = self._totals.get(id(shape))
        if found is None:
            found = self._totals[id(shape)] = _summed((*self._frame_parts(), *self._shape_parts(shape)))
        return found

    def with_shape(self, shape: Shape) -> TrainingConfig:
        """Returns its configuration with a shape; always the same record.

        The frozen record is copied field by field rather than by `replace`, which costs ten times as much and has
        nothing to check here: it happens thousands of times.
        """
        config = self._configs.get(id(shape))
        if config is None:
            config = object.__new__(TrainingConfig)
            config.__dict__.update(self.config.__dict__)
            config.__dict__.update(shape.changes)
            self._configs[id(shape)] = config
        return config

    def candidate(self, shape: Shape) -> Candidate:
        """Returns one of its configurations with its price."""
        parts = {kind.name: part for kind, part in zip(_WHOLE, self._frame_parts(), strict=True)}
        parts |= {kind.name: part for kind, part in zip(_SHAPED, self._shape_parts(shape), strict=True)}
        return Candidate(
            self.with_shape(shape),
            (*self.techniques, *shape.techniques),
            max(self.rung, shape.rung),
            total(tuple(parts[kind.name] for kind in PARTS)),
        )

    def _frame_parts(self) -> tuple[Part, ...]:
        if self._whole is None:
            config, estimator = self.config, self._estimator
            self._whole = tuple(estimator.part(kind, config) for kind in _WHOLE)
            self._tables = tuple(estimator.table(kind, kind.frame(config)) for kind in _SHAPED)
        return self._whole

    def _shape_parts(self, shape: Shape, count: int = len(_SHAPED)) -> list[Part]:
        """Returns the first `count` parts that depend on the shape."""
        parts = []
        for kind, key, table in zip(_SHAPED[:count], shape.keys, self._tables, strict=False):
            part = table.get(key)
            if part is None:
                part = table[key] = self._estimator.build(kind, self.with_shape(shape))
            parts.append(part)
        return parts


def _summed(parts: tuple[Part, ...]) -> Totals:
    """Returns the largest sums over the moments."""
    gpu = max(map(sum, zip(*[part.gpu for part in parts], strict=True)))
    elsewhere = [part for part in parts if part.off_gpu]
    return Totals(
        gpu + sum([part.gpu_outside for part in parts]),
        max(map(sum, zip(*[part.host for part in elsewhere], strict=True)), default=0),
        max(map(sum, zip(*[part.nvme for part in elsewhere], strict=True)), default=0),
    )


class Space:
    """Every valid configuration of a question that has the required techniques.

    Attributes:
        frames: All of them, in order of enumeration.
        considered: Number of configurations. Every one of them is decided: priced, or ruled out by one of the bounds
            above, or passed over because what stands on a lower rung suffices.
        rungs: The rungs that have configurations, ascending.
    """

    def __init__(self, question: Question, estimator: Estimator, places: dict[str, int]) -> None:
        self.question = question
        self.frames = _frames(question, estimator, places)
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
        kept = {technique.name for technique in techniques if technique.dimension in SHAPE_DIMENSIONS}
        budget, found = self.question.budget, []
        for index, (frame, line) in enumerate(self.pairs(rung)):
            own = frame.names == names - kept
            for shape in line.shapes:
                mine = {technique.name for technique in shape.techniques}
                if own or mine == kept:
                    found.append((len(names ^ (frame.names | mine)), -index, frame, shape))
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
                        if len(shape.techniques) == len(rest) and {item.name for item in shape.techniques} == rest:
                            return frame.candidate(shape)
        return None

    def candidates(self) -> list[Candidate]:
        """Returns all configurations, each with its price."""
        return [frame.candidate(shape) for frame, line in self.pairs() for shape in line.shapes]

    def _fit(self, frame: Frame, line: Line) -> int:
        budget, shapes = self.question.budget, line.shapes
        if not frame.bound(shapes[0]).within(budget) or not frame.totals(shapes[0]).within(budget):
            return 0
        if frame.totals(shapes[-1]).within(budget):
            return len(shapes)
        low, high = 1, len(shapes) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if frame.totals(shapes[middle - 1]).within(budget):
                low = middle
            else:
                high = middle - 1
        return low


def _frames(question: Question, estimator: Estimator, places: dict[str, int]) -> list[Frame]:
    """Returns every frame that techniques lead to, one per dimension at most, with the shapes that go with it."""
    shapes = _Shapes(question, places)
    options = _options(question, [dimension for dimension in Dimension if dimension not in SHAPE_DIMENSIONS])
    frames: list[Frame] = []

    def extend(config: TrainingConfig, used: tuple[Technique, ...], depth: int) -> None:
        if depth == len(options):
            lines = shapes.lines(config, frozenset(technique.name for technique in used))
            if lines:
                rung = max((places[technique.name] for technique in used), default=1)
                frames.append(Frame(config, used, rung, lines, estimator))
            return
        extend(config, used, depth + 1)
        for technique in options[depth]:
            if technique.why_not(config, question.situation) is None:
                extend(technique.apply(config, question.situation), (*used, technique), depth + 1)

    extend(question.asked, (), 0)
    return frames


def _options(question: Question, dimensions: list[Dimension]) -> list[list[Technique]]:
    """Returns what may be used of each dimension."""
    return [
        [
            technique
            for technique in LADDER
            if technique.dimension is dimension
            and technique.name not in question.forbidden
            and dimension not in question.frozen
        ]
        for dimension in dimensions
    ]


class _Shapes:
    """The shapes of frames: made once for all frames that allow the same shape techniques on the same settings."""

    def __init__(self, question: Question, places: dict[str, int]) -> None:
        self._situation = question.situation
        self._required = question.required
        self._places = places
        self._options = _options(question, list(SHAPE_DIMENSIONS))
        self._known: dict[Hashable, tuple[Line, ...]] = {}

    def lines(self, config: TrainingConfig, names: frozenset[str]) -> tuple[Line, ...]:
        """Returns the shapes of a frame that, with the frame's techniques, have all required ones."""
        missing = self._required - names
        key = (
            self._allowed(config),
            missing,
            *(kind.shape(config) for kind in _SHAPED if kind.shape is not None),
            config.gradient_accumulation_steps,
        )
        if key not in self._known:
            self._known[key] = self._lines(config, missing)
        return self._known[key]

    def _allowed(self, config: TrainingConfig) -> tuple[bool, ...]:
        """Returns what the frame allows of each technique, by itself and after one of each dimension before it."""
        found, probe = [], config
        for options in self._options:
            after = probe
            for technique in options:
                possible = technique.why_not(probe, self._situation) is None
                found += [possible, technique.why_not(config, self._situation) is None]
                if possible and after is probe and technique.dimension is not Dimension.MICRO_BATCH:
                    after = technique.apply(probe, self._situation)
            probe = after
        return tuple(found)

    def _lines(self, config: TrainingConfig, missing: frozenset[str]) -> tuple[Line, ...]:
        combinations: list[tuple[TrainingConfig, tuple[Technique, ...]]] = [(config, ())]
        for options in self._options:
            combinations += [
                (technique.apply(start, self._situation), (*used, technique))
                for start, used in tuple(combinations)
                for technique in options
                if technique.why_not(start, self._situation) is None
            ]
        alike: dict[Hashable, list[Shape]] = {}
        for changed, used in combinations:
            if missing <= {technique.name for technique in used}:
                shape = self._shape(config, changed, used)
                others = tuple(item.name for item in used if item.dimension is not Dimension.MICRO_BATCH)
                alike.setdefault((others, shape.rung, shape.accumulates), []).append(shape)
        return tuple(
            Line(tuple(sorted(shapes, key=lambda shape: shape.changes["micro_batch_size"])), shapes[0].rung)
            for shapes in alike.values()
        )

    def _shape(self, config: TrainingConfig, changed: TrainingConfig, used: tuple[Technique, ...]) -> Shape:
        before, after = config.__dict__, changed.__dict__
        changes = {name: value for name, value in after.items() if value is not before[name]}
        changes["micro_batch_size"] = changed.micro_batch_size
        return Shape(
            changes=changes,
            techniques=used,
            rung=max((self._places[technique.name] for technique in used), default=1),
            accumulates=changed.gradient_accumulation_steps > 1,
            keys=tuple(kind.shape(changed) for kind in _SHAPED if kind.shape is not None),
        )
