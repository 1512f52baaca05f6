"""What several layers of a stack share: attention biases that the lowest of them makes, and their gradients.

A bias is made once, by the lowest layer. The model's forward holds it until the stack has run; a checkpointed layer
holds it as one of its arguments, and another where its backward needs it as it is. Its gradient comes from the highest
layer, takes up those of the layers below, and goes when the lowest one has used it. A bias that is nothing but zeros is
a leaf of the graph under checkpointing: bias and gradient then stay until backward has ended. The output of another
stack that layers attend to has such a gradient too.
Source: transformers 5.24.0 models/t5/modeling_t5.py T5Stack.forward and T5Attention.forward; torch
    autograd/functions/accumulate_grad.h (the node of a leaf holds it), utils/checkpoint.py (arguments are held).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memc.facts.records import ModelFacts
from memc.ledger.blockrun import LayerMode
from memc.ledger.peaks import Shapes
from memc.ledger.places import Place, places, stack_ends

SOURCE = "transformers modeling_t5.py T5Attention.forward, modeling_bart.py; torch accumulate_grad.h, checkpoint.py"
_OWN, _CROSS, _OUTPUT, _TABLE = "position_bias", "cross_bias", "source", "position_table"
_NAMES = {_OWN: "position bias", _CROSS: "cross-attention bias", _OUTPUT: "encoder output", _TABLE: "position table"}
BIASES = frozenset((_OWN, _CROSS, _TABLE))
"""Names of biases in programs."""
MADE_BEFORE = frozenset((_TABLE,))
"""Names of those that the lowest layer is given too."""


@dataclass(frozen=True, slots=True)
class Shared:
    """One tensor that several layers use, in bytes. Positions count all layers of the model, bottom first.

    Attributes:
        name: What it is.
        first, last: Positions of the lowest and the highest layer that use it.
        held_from: The lowest position of a layer that holds it until its backward; None when none does.
        size: Bytes of the tensor; 0 when it is counted elsewhere.
        gradient: Bytes of its gradient; 0 without one.
        ends: Position from which on down its gradient is counted elsewhere.
        stays: Whether tensor and gradient stay until backward has ended.
    """

    name: str
    first: int
    last: int
    held_from: int | None
    size: int
    gradient: int
    ends: int
    stays: bool

    def in_forward(self, at: int) -> int:
        """Returns its bytes while a layer runs forward, or (`at` above all layers) when all have."""
        held = self.stays or self.held_from is not None
        return self.size if self.first <= at and (at <= self.last or held) else 0

    def in_backward(self, at: int) -> int:
        """Returns its bytes while a layer runs backward, or (`at` below all layers) when all have."""
        held = self.held_from is not None and self.held_from <= at
        return self.size if self.stays or held else 0

    def gradient_at(self, at: int) -> int:
        """Returns bytes of its gradient while a layer runs backward; what the highest layer makes is counted there."""
        return self.gradient if at < self.last and (self.stays or at >= self.ends) else 0


def shared_tensors(
    model: ModelFacts,
    mode: LayerMode,
    held: Sequence[frozenset[str]],
    shapes: Shapes,
    *,
    checkpointing: bool,
    given_item: int,
) -> tuple[Shared, ...]:
    """Returns what the layers of each stack share.

    Args:
        model: The model.
        mode: The mode.
        held: By position among the model's places, the names of shared tensors that a layer holds until its backward.
        shapes: Shape variables of a micro batch.
        checkpointing: Whether any layer is checkpointed.
        given_item: Bytes of one element of what a stack gives to another.
    """
    run, found = places(model), []
    for first, last in stack_ends(model):
        place = run[last]
        for name in _NAMES:
            if name not in place.block.forward:
                continue
            size, gradient, ends = 0, 0, first
            stays = name == _CROSS and checkpointing
            if name == _OUTPUT:
                ends = next((at for at in range(first, -1, -1) if run[at].gives), first) + 1
                if place.block.cross_attention is not None and (mode.trains or mode.adapted):
                    gradient = given_item * place.source_width * shapes.of(place.source_unit)
            elif name == _TABLE:
                size = _table_bytes(place, mode)
                gradient = size if mode.trains else 0
            else:
                size = _bias_bytes(place, mode, shapes, own=name == _OWN)
                gradient = size if stays or (name == _OWN and mode.trains) else 0
            holders = [at for at in range(first, last + 1) if name in held[at]]
            found.append(Shared(_NAMES[name], first, last, min(holders, default=None), size, gradient, ends, stays))
    return tuple(found)


def outputs_that_stay(model: ModelFacts, inputs: Sequence[int]) -> tuple[Shared, ...]:
    """Returns the outputs of layers that a model gathers, and lets go of when all layers have run.

    What a layer above keeps for backward is counted with that layer, its input while it runs, and what the lowest layer
    is given as the embedding's output.
    Source: transformers 5.24.0 models/deberta_v2/modeling_deberta_v2.py DebertaV2Encoder.forward, all_hidden_states.

    Args:
        model: The model.
        inputs: By position among the model's places, bytes of a layer's input that it does not keep.
    """
    run, found = places(model), []
    for first, last in stack_ends(model):
        if not run[last].block.attention.position_table:
            continue
        held = [(at + 1, inputs[at]) for at in range(first + 1, last) if inputs[at]]
        found += [Shared("output of the layer below", at, last, None, size, 0, 0, False) for at, size in held]
    return tuple(found)


def _bias_bytes(place: Place, mode: LayerMode, shapes: Shapes, *, own: bool) -> int:
    """Returns the bytes of a bias: one number per head and pair of positions, in the type of the table or of scores."""
    columns = place.rows if own else place.source_unit.partition("*")[2]
    item = mode.types.weight if own else mode.types.compute
    return item * place.block.attention.heads * shapes.of(place.rows) * shapes.of(columns)


def _table_bytes(place: Place, mode: LayerMode) -> int:
    """Returns the bytes of a table of positions that has passed a norm, which autocast computes in fp32."""
    item = 4 if mode.types.autocast else mode.types.weight
    return item * place.block.attention.position_table * dict(place.block.sizes)["hidden"]
