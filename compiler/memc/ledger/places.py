"""Where every layer of a model stands: its stack, the positions that it sees, and what other stacks give it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memc.facts.records import Block, ModelFacts, Sees, Stack


@dataclass(frozen=True, slots=True)
class Place:
    """One layer, or what runs before or after the layers of a stack.

    Attributes:
        block: What it computes.
        index: Its number among all layers of the model, in order; -1 for what is no layer.
        lowest: Whether no layer lies below it in its stack, so that no adapter does.
        first: Whether it is the first of its stack: its input is what the embedding gives.
        unit: Shape variables of its positions.
        source_unit: Shape variables of the positions of the stack that it attends to; empty without one.
        source_width: Elements of each of those.
        gives: Elements of its output that other stacks read, per position; 0 when none does.
        images: Whether it puts features of images, which lie below it, into the stream.
        follows: Whether what lies below it is no embedding though no layer of its stack does.
    """

    block: Block
    index: int
    lowest: bool
    first: bool
    unit: str
    source_unit: str = ""
    source_width: int = 0
    gives: int = 0
    images: bool = False
    follows: bool = False

    @property
    def rows(self) -> str:
        """Shape variables of one sample's positions, or of one image's."""
        return self.unit.partition("*")[2]


_KNOWN: dict[int, tuple[ModelFacts, tuple[Place, ...]]] = {}


def places(model: ModelFacts) -> tuple[Place, ...]:
    """Returns the places of all stacks in the order in which they run; equal blocks are the same object."""
    found = _KNOWN.get(id(model))
    if found is None or found[0] is not model:
        found = _KNOWN[id(model)] = (model, tuple(_all_places(model)))
    return found[1]


_ALIKE: dict[int, tuple[ModelFacts, tuple[tuple[int, ...], ...]]] = {}


def alike_places(model: ModelFacts) -> tuple[tuple[int, ...], ...]:
    """Returns the positions of layers among the places, those of one block and stack together, bottom first."""
    found = _ALIKE.get(id(model))
    if found is None or found[0] is not model:
        alike: dict[str, list[int]] = {}
        for at, place in enumerate(places(model)):
            if place.index >= 0:
                alike.setdefault(f"{id(place.block)} {place.unit} {place.source_unit}", []).append(at)
        found = _ALIKE[id(model)] = (model, tuple(tuple(positions) for positions in alike.values()))
    return found[1]


_STACKS: dict[int, tuple[ModelFacts, tuple[tuple[int, int], ...]]] = {}


def stack_ends(model: ModelFacts) -> tuple[tuple[int, int], ...]:
    """Returns the positions of the lowest and the highest layer of every stack among the places."""
    found = _STACKS.get(id(model))
    if found is None or found[0] is not model:
        ends: list[tuple[int, int]] = []
        for at, place in enumerate(places(model)):
            if place.index >= 0 and place.lowest:
                ends.append((at, at))
            elif place.index >= 0:
                ends[-1] = (ends[-1][0], at)
        found = _STACKS[id(model)] = (model, tuple(ends))
    return found[1]


def unit_of(stack: Stack) -> str:
    """Returns the shape variables of a stack's positions: samples times tokens, or images times what one takes."""
    if stack.sees is Sees.IMAGE:
        return "I*P" if stack.positions_per_item is None else f"I*{stack.positions_per_item}"
    if stack.sees in (Sees.TEXT, Sees.SOURCE) or stack.positions_per_item is None:
        return "B*T"
    return f"B*{stack.positions_per_item}"


def _all_places(model: ModelFacts) -> list[Place]:
    known: dict[Block, Block] = {}
    found: list[Place] = []
    index = 0
    source: Stack | None = None
    for stack in model.stacks:
        blocks: list[Block] = []
        for group in stack.groups:
            if group.block not in known:
                known[group.block] = group.block
            blocks += [known[group.block]] * group.count
        skipped, blocks = blocks[len(blocks) - stack.unused_layers :], blocks[: len(blocks) - stack.unused_layers]
        unit = unit_of(stack)
        if stack.before is not None:
            place = Place(stack.before, -1, True, True, unit)
            if source is not None and source.sees is Sees.IMAGE and "image_features" in stack.before.forward:
                place = replace(place, images=True)
            found.append(place)
        for number, block in enumerate(blocks):
            reads = source if block.cross_attention is not None else None
            found.append(
                Place(
                    block,
                    index,
                    number == 0,
                    number == 0 and stack.before is None,
                    unit,
                    follows=stack.before is not None and (found[-1].images or stack.sees is Sees.IMAGE),
                    source_unit="" if reads is None else unit_of(reads),
                    source_width=0 if reads is None else reads.hidden_size,
                )
            )
            index += 1
        index += len(skipped)
        if stack.sees is Sees.IMAGE:
            found += [Place(stack.after, -1, False, False, unit)] if stack.after is not None else []
        elif stack.after is not None:
            found.append(Place(stack.after, -1, False, False, unit, gives=stack.hidden_size))
        elif stack.name:
            found.append(replace(found.pop(), gives=stack.hidden_size))
        source = stack
    return found
