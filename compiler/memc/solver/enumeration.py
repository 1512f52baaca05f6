"""Every valid frame of a question, and the shapes that go with it."""

from __future__ import annotations

from collections.abc import Hashable

from memc.clock.estimate import pass_key
from memc.config import TrainingConfig
from memc.ladder import LADDER, Dimension, Technique
from memc.ledger.estimate import Estimator
from memc.solver.frames import SHAPED, Frame, Line, Shape
from memc.solver.resolve import Question

SHAPE_DIMENSIONS = (
    Dimension.LOSS,
    Dimension.CHECKPOINTING,
    Dimension.CHECKPOINT_OFFLOAD,
    Dimension.MICRO_BATCH,
)


def frames_of(question: Question, estimator: Estimator, places: dict[str, int]) -> list[Frame]:
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
            *(kind.shape(config) for kind in SHAPED if kind.shape is not None),
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
                found.append(possible)
                if probe is not config and technique.dimension is not Dimension.MICRO_BATCH:
                    found.append(technique.why_not(config, self._situation) is None)
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
            names=frozenset(technique.name for technique in used),
            rung=max((self._places[technique.name] for technique in used), default=1),
            accumulates=changed.gradient_accumulation_steps > 1,
            keys=tuple(kind.shape(changed) for kind in SHAPED if kind.shape is not None),
            pass_key=pass_key(changed),
            passes=changed.gradient_accumulation_steps,
        )
