"""Frames and shapes: the two halves of a configuration, and what they need together."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from memc.config import TrainingConfig
from memc.ladder import Technique
from memc.ledger.adapted import adapted_model
from memc.ledger.entries import Moment
from memc.ledger.estimate import PARTS, Estimator, Price, total
from memc.ledger.parts import MOMENTS, Part, held_bytes
from memc.plan import Budget

_WHOLE = tuple(kind for kind in PARTS if kind.shape is None)
_STEADY = tuple(kind for kind in PARTS if kind.shape is not None and not kind.tokens)
_TOKENS = tuple(kind for kind in PARTS if kind.shape is not None and kind.tokens)
SHAPED = (*_STEADY, *_TOKENS)
_BOUNDED = [(at, kind, kind.least) for at, kind in enumerate(SHAPED) if kind.least is not None]
_RESUME = MOMENTS.index(Moment.RESUME)
_LOSS = MOMENTS.index(Moment.LOSS)


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

    @property
    def needs(self) -> Totals:
        """What it needs while it runs."""
        return _summed(self.price.parts)


@dataclass(frozen=True, slots=True)
class Shape:
    """Settings of a pass that go with every frame of one kind.

    Attributes:
        changes: Fields of the frame's configuration that it sets.
        techniques: In order of application.
        names: Their names.
        rung: The highest among them; 1 without any.
        accumulates: Whether several micro-batches make a step.
        keys: For each part that depends on the shape, the settings it depends on.
        pass_key: What tells its micro-batch apart from others of a frame.
        passes: Micro-batches of a step.
    """

    changes: dict[str, Any]
    techniques: tuple[Technique, ...]
    names: frozenset[str]
    rung: int
    accumulates: bool
    keys: tuple[Hashable, ...]
    pass_key: tuple[object, ...]
    passes: int


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Shapes that differ in their micro-batch alone, by rising micro-batch: memory never falls along a line."""

    shapes: tuple[Shape, ...]
    rung: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What one configuration needs while it runs, in bytes.

    Of the host, what resuming holds for a moment is left out: states that are read beside states that wait for them
    decide whether a run can be taken up again on this node, not whether it fits. The plan says so where they do not.
    """

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
        "_least",
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
        self._bounds: dict[Hashable, tuple[Totals, int]] = {}
        self._tables: tuple[dict[Hashable, Part], ...] = ()
        self._least: list[dict[Hashable, int]] = []
        self._totals: dict[int, Totals] = {}
        self._configs: dict[int, TrainingConfig] = {}

    @property
    def count(self) -> int:
        """Number of its configurations."""
        return sum(len(line.shapes) for line in self.lines)

    def bound(self, shape: Shape) -> Totals:
        """Returns what it needs at least with a shape, the tokens of a pass left out: a lower bound of `totals`."""
        return self._bound(shape)[0]

    def may_fit(self, shape: Shape, budget: Budget) -> bool:
        """Whether no lower bound of what it needs with a shape is above a budget; most that do not fit are told here.

        Beside `bound` it is what the card holds at the loss, with what layers leave for backward.
        """
        totals, at_loss = self._bound(shape)
        return totals.within(budget) and at_loss + self._waiting(shape) <= budget.gpu_bytes

    def _bound(self, shape: Shape) -> tuple[Totals, int]:
        """Returns what it needs at least with a shape, and what of that is on the card at the loss."""
        key = shape.keys[: len(_STEADY)]
        found = self._bounds.get(key)
        if found is None:
            parts = (*self._frame_parts(), *self._shape_parts(shape, len(_STEADY)))
            at_loss = sum([part.gpu[_LOSS] + part.gpu_outside for part in parts])
            found = self._bounds[key] = _summed(parts), at_loss
        return found

    def _waiting(self, shape: Shape) -> int:
        waiting = 0
        for (at, _, least), table in zip(_BOUNDED, self._least, strict=True):
            key = shape.keys[at]
            if key not in table:
                config = self.with_shape(shape)
                table[key] = least(adapted_model(self._estimator.model, config), config)
            waiting += table[key]
        return waiting

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
        parts |= {kind.name: part for kind, part in zip(SHAPED, self._shape_parts(shape), strict=True)}
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
            self._tables = tuple(estimator.table(kind, kind.frame(config)) for kind in SHAPED)
            self._least = [estimator.least_table(kind, kind.frame(config)) for _, kind, _ in _BOUNDED]
        return self._whole

    def _shape_parts(self, shape: Shape, count: int = len(SHAPED)) -> list[Part]:
        """Returns the first `count` parts that depend on the shape."""
        parts = []
        for kind, key, table in zip(SHAPED[:count], shape.keys, self._tables, strict=False):
            part = table.get(key)
            if part is None:
                part = table[key] = self._estimator.build(kind, self.with_shape(shape))
            parts.append(part)
        return parts


def _summed(parts: tuple[Part, ...]) -> Totals:
    """Returns the largest sums over the moments; never more with fewer parts."""
    gpu = held_bytes(parts)
    elsewhere = [part for part in parts if part.off_gpu]
    host = list(map(sum, zip(*[part.host for part in elsewhere], strict=True)))
    return Totals(
        gpu + sum([part.gpu_outside for part in parts]),
        max(host[:_RESUME] + host[_RESUME + 1 :], default=0),
        max(map(sum, zip(*[part.nvme for part in elsewhere], strict=True)), default=0),
    )
