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
    """

    block: Block
    index: int
    lowest: bool
    first: bool
    unit: str
    source_unit: str = ""
    source_width: int = 0
    gives: int = 0

    @property
    def rows(self) -> str:
        """Shape variables of one sample's positions."""
        return self.unit.removeprefix("B*")


_KNOWN: dict[int, tuple[ModelFacts, tuple[Place, ...]]] = {}


def places(model: ModelFacts) -> tuple[Place, ...]:
    """Returns the places of all stacks in the order in which they run; equal blocks are the same object."""
    found = _KNOWN.get(id(model))
    if found is None or found[0] is not model:
        found = _KNOWN[id(model)] = (model, tuple(_all_places(model)))
    return found[1]


def unit_of(stack: Stack) -> str:
    """Returns the shape variables of a stack's positions: samples times tokens, or times what one image takes."""
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
        unit = unit_of(stack)
        if stack.before is not None:
            found.append(Place(stack.before, -1, True, True, unit))
        for number, block in enumerate(blocks):
            reads = source if block.cross_attention is not None else None
            found.append(
                Place(
                    block,
                    index,
                    number == 0,
                    number == 0 and stack.before is None,
                    unit,
                    source_unit="" if reads is None else unit_of(reads),
                    source_width=0 if reads is None else reads.hidden_size,
                )
            )
            index += 1
        if stack.after is not None:
            found.append(Place(stack.after, -1, False, False, unit, gives=stack.hidden_size))
        elif stack.name:
            found.append(replace(found.pop(), gives=stack.hidden_size))
        source = stack
    return found
