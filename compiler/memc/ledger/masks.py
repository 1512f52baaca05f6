"""Attention masks: what a model makes once for each kind of attention of a stack, and which layers hold it."""

from __future__ import annotations

from dataclasses import replace

from memc.config import Attention
from memc.facts.records import ModelFacts
from memc.ledger.blockrun import LayerMode, made_item
from memc.ledger.peaks import Shapes
from memc.ledger.places import Place, alike_places, places
from memc.ledger.shared import Shared

SOURCE = (
    "transformers masking_utils.py sdpa_mask, eager_mask, create_causal_mask, create_bidirectional_mask; "
    "deberta_v2/modeling_deberta_v2.py DebertaV2Encoder"
)


def attention_masks(model: ModelFacts, mode: LayerMode, shapes: Shapes, every: int) -> tuple[Shared, ...]:
    """Returns the masks that a model hands to its layers.

    They live until the layers of their stack have run; a checkpointed layer holds its own until it has been run again.

    Args:
        model: The model.
        mode: The mode.
        shapes: Shape variables of a micro batch.
        every: Every how many layers one is checkpointed; 0 for none.
    """
    if mode.attention is Attention.FLASH_ATTENTION_2:
        return ()
    run = places(model)
    found: dict[str, Shared] = {}
    for positions in alike_places(model):
        place = run[positions[0]]
        held = next((at for at in positions if every and run[at].index % every == 0), None)
        for kind, size in _of_layer(place, mode, shapes):
            key = f"{kind} {place.unit} {place.block.attention.sliding_window if kind != _CROSS else None}"
            made = Shared(kind, positions[0], positions[-1], held, size, 0, 0, False)
            found[key] = _together(found[key], made) if key in found else made
    return tuple(found.values())


def _together(one: Shared, other: Shared) -> Shared:
    """Returns a mask that layers of two kinds use."""
    held = [at for at in (one.held_from, other.held_from) if at is not None]
    first, last = min(one.first, other.first), max(one.last, other.last)
    return replace(one, first=first, last=last, held_from=min(held, default=None))


_CAUSAL, _PADDED, _CROSS = "causal mask", "mask of padding", "mask of another stack's padding"
_PAIRS, _DISTANCES = "mask of pairs", "distances of positions"
_INDEX_BYTES, _ONES_BYTES = 8, 4


def _of_layer(place: Place, mode: LayerMode, shapes: Shapes) -> list[tuple[str, int]]:
    """Returns the masks that a layer is given: kind and bytes.

    A mask that is added to scores is written out for every sample, whether they differ or not.
    """
    attention, eager = place.block.attention, mode.attention is Attention.EAGER
    if attention.position_table:
        pairs = shapes.of(place.rows) ** 2
        item = _INDEX_BYTES if mode.mask else _ONES_BYTES  # the batch's mask as it is, or ones that the model makes
        return [(_PAIRS, item * shapes.variables["B"] * pairs), (_DISTANCES, _INDEX_BYTES * pairs)]
    padded = mode.mask and attention.padded
    window = attention.sliding_window
    cut = window is not None and mode.length >= window
    row = (made_item(attention, mode) if eager else 1) * shapes.of(place.rows)
    found = []
    if padded or cut or attention.always_masked or (eager and attention.causal):
        samples = shapes.variables["B"] if padded or eager else 1
        found.append((_CAUSAL if attention.causal else _PADDED, row * samples * shapes.of(place.rows)))
    cross = place.block.cross_attention
    if cross is not None and mode.mask and cross.padded:
        found.append((_CROSS, row * shapes.variables["B"] * shapes.of(place.source_unit.partition("*")[2])))
    return found
