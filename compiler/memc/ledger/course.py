"""The layers that a pass goes through, bottom first, with what each does to memory; shapes stay open."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memc.config import TrainingConfig
from memc.facts.records import Block, ModelFacts
from memc.ledger.blockrun import LayerMode, LayerRun, Situation, layer_run, situation, sum_of
from memc.ledger.peaks import Shapes, Sum
from memc.ledger.places import Place, places
from memc.ledger.shared import BIASES, MADE_BEFORE

_GIVEN = ("source", "position_bias", "cross_bias", "position_table")


@dataclass(frozen=True, slots=True)
class Stretch:
    """What layers that differ in their place alone have in common.

    Attributes:
        run: What each does to memory.
        kept: Bytes that wait for backward in each that is not checkpointed, by unit of shape.
        checkpointed: Whether each keeps its input only.
        after_freed: Whether the layer below is checkpointed.
        gives: Elements of its output that other stacks read, per position.
        unit: Shape variables of its positions.
    """

    run: LayerRun
    kept: Sum
    checkpointed: bool
    after_freed: bool
    gives: int
    unit: str

    def waits(self, shapes: Shapes, *, offloaded: bool) -> int:
        """Returns what each leaves for backward, in bytes, weight copies left out.

        Args:
            shapes: Shape variables of a micro batch.
            offloaded: Whether inputs of checkpointed layers go to the host.
        """
        waits = self.kept.bytes(shapes)
        if self.checkpointed:
            waits = 0 if offloaded else self.run.input.bytes(shapes)
        return waits + (self.gives * self.run.output_item * shapes.of(self.unit) if self.gives else 0)


@dataclass(frozen=True, slots=True)
class Course:
    """All layers of a model in the order in which they run.

    Attributes:
        stretches: Layers that differ from each other.
        order: The number of its stretch, for each layer.
        held: Names of what each layer shares with others and keeps for backward.
        tower: Whether the last layer over images needs a gradient, and bytes of one element of its output.
    """

    stretches: tuple[Stretch, ...]
    order: tuple[int, ...]
    held: tuple[frozenset[str], ...]
    tower: tuple[bool, int]


_COURSES: dict[Any, tuple[ModelFacts, Course]] = {}


def course_of(model: ModelFacts, config: TrainingConfig, mode: LayerMode, shapes: Shapes) -> Course:
    """Returns the course of a model under a mode and a checkpointing setting; sizes of the batch stay open.

    One sample, and one image, run otherwise than several do; how many these are does not matter.
    """
    every, images = config.checkpoint_every, shapes.variables.get("I", 0)
    key = (id(model), mode, every, config.micro_batch_sequences == 1, images == 1)
    found = _COURSES.get(key)
    if found is None or found[0] is not model:
        found = _COURSES[key] = (model, _course(model, config, mode, shapes))
    return found[1]


def _course(model: ModelFacts, config: TrainingConfig, mode: LayerMode, shapes: Shapes) -> Course:
    every = config.checkpoint_every
    known: dict[tuple[int, bool, bool, int, bool], int] = {}
    stretches: list[Stretch] = []
    order: list[int] = []
    held: list[frozenset[str]] = []
    item, reaches, after_freed, given_item = mode.types.stream, False, False, 0
    tower = (reaches, item)
    for kind, place, topmost in _kinds(model):
        checkpointed = bool(every) and place.index >= 0 and place.index % every == 0
        key = (kind, checkpointed, reaches, item, after_freed)
        number = known.get(key)
        if number is None:
            # rows of the embedding that train lie below every layer but the lowest, an adapter below those above it
            below = not place.lowest and (reaches or mode.embedding_trains)
            reached = reaches if place.follows else below or mode.trains or bool(every)
            features = (reaches, item) if place.images else (False, 0)
            item = mode.types.stream if place.first else item
            around = _around(place, config, mode, shapes, reached=reached, item=item)
            around = replace(around, topmost=topmost, given_item=given_item)
            if place.images:
                unit, width = stretches[order[-1]].run.output
                around = replace(around, source_unit=unit, source_width=width)
                around = replace(around, source_needs_grad=features[0], source_item=features[1])
            run = layer_run(place.block, mode, around)
            number = len(stretches)
            stretches.append(Stretch(run, sum_of(list(run.kept)), checkpointed, after_freed, place.gives, place.unit))
            if not place.images:  # what it reads depends on the layer before it
                known[key] = number
        run = stretches[number].run
        order.append(number)
        held.append(run.holds if not checkpointed else MADE_BEFORE if place.lowest else BIASES)
        item, reaches, after_freed = run.output_item, run.reaches, checkpointed
        given_item = item if place.gives else given_item
        tower = (reaches, item) if place.unit.startswith("I*") else tower
    return Course(tuple(stretches), tuple(order), tuple(held), tower)


def _is_given_more(block: Block) -> bool:
    """Returns whether a layer's program names something that other stacks or all layers share."""
    return any(name in block.forward for name in _GIVEN)


_KINDS: dict[int, tuple[ModelFacts, tuple[tuple[int, Place, bool], ...]]] = {}


def _kinds(model: ModelFacts) -> tuple[tuple[int, Place, bool], ...]:
    """Returns every place with a number that places which differ in their index alone share, and whether it is topmost.

    Topmost is the highest layer of a stack whose program names something shared.
    """
    found = _KINDS.get(id(model))
    if found is None or found[0] is not model:
        known: list[tuple[int, Place, bool]] = []  # few of them
        kinds = []
        run_order = places(model)
        for place, above in zip(run_order, [*run_order[1:], None], strict=True):
            topmost = (above is None or above.lowest or above.index < 0) and _is_given_more(place.block)
            alike = id(place.block), replace(place, block=run_order[0].block, index=min(place.index, 0)), topmost
            if alike not in known:
                known.append(alike)
            kinds.append((known.index(alike), place, topmost))
        found = _KINDS[id(model)] = (model, tuple(kinds))
    return found[1]


def _around(
    place: Place, config: TrainingConfig, mode: LayerMode, shapes: Shapes, *, reached: bool, item: int
) -> Situation:
    """Returns what surrounds the layer of a place."""
    batch = shapes.variables["I"] if place.unit.startswith("I*") else config.micro_batch_sequences
    around = situation(place.block, mode, batch=batch, input_needs_grad=reached, input_item=item)
    pairs = f"{place.rows}*{place.rows}"
    return (
        replace(
            around,
            unit=place.unit,
            mask_unit=f"B*{pairs}" if mode.mask else pairs,
            source_unit=place.source_unit or place.unit,
            source_width=place.source_width,
            single=batch == 1,
            checkpointing=bool(config.checkpoint_every),
        )
        if _is_given_more(place.block)
        else replace(around, unit=place.unit, mask_unit=f"B*{pairs}" if mode.mask else pairs)
    )
