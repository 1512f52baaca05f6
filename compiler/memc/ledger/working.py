"""Temporaries of the layer that is running: what is alive beside the tensors that layers keep."""

from __future__ import annotations

from dataclasses import dataclass

from memc.facts.records import Block
from memc.ledger.layer import LayerMode


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes per token as multiples of the hidden and the MLP's inner width, for 2-byte products."""

    hidden: int
    inner: int

    def per_token(self, hidden: int, inner: int, compute_bytes: int) -> int:
        """Returns bytes per token at the given widths."""
        return (self.hidden * hidden + self.inner * inner) * compute_bytes // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSet:
    """Largest temporaries of one layer, beyond what it keeps and the gradient of the residual stream.

    Attributes:
        forward_kept: In forward, when the layer keeps its activations.
        forward_checkpointed: In forward, when it keeps its input only.
        backward: In backward, at the end of the MLP.
        recomputed: In backward of a recomputed layer, beyond all that the layer would have kept.
    """

    forward_kept: Widths
    forward_checkpointed: Widths
    backward: Widths
    recomputed: Widths


_FULL = WorkingSet(
    forward_kept=Widths(6, 0), forward_checkpointed=Widths(4, 6), backward=Widths(0, 4), recomputed=Widths(0, 4)
)
_FULL_AUTOCAST = WorkingSet(
    forward_kept=Widths(2, 0), forward_checkpointed=Widths(8, 6), backward=Widths(0, 4), recomputed=Widths(-4, 4)
)
_ADAPTERS_CAST = WorkingSet(
    forward_kept=Widths(10, 6), forward_checkpointed=Widths(8, 8), backward=Widths(0, 4), recomputed=Widths(8, 6)
)
_ADAPTERS_SAME = WorkingSet(
    forward_kept=Widths(8, 0), forward_checkpointed=Widths(4, 8), backward=Widths(0, 4), recomputed=Widths(0, 4)
)
_ADAPTERS_WIDE = WorkingSet(
    forward_kept=Widths(14, 2), forward_checkpointed=Widths(14, 8), backward=Widths(2, 4), recomputed=Widths(14, 4)
)


def working_set(mode: LayerMode) -> WorkingSet:
    """Returns the temporaries of a layer under a mode.

    Assumes: a gated MLP whose inner width is at least twice the hidden width: its end is the busiest place.
    Source: storage trace of one step of the transformers modelling code, transformers 5.24, torch 2.13.
    """
    types = mode.types
    if mode.trains:
        return _FULL_AUTOCAST if types.autocast else _FULL
    if types.adapter == types.compute:
        return _ADAPTERS_SAME
    return _ADAPTERS_CAST if types.autocast else _ADAPTERS_WIDE


def last_weight_gradient_bytes(block: Block, mode: LayerMode) -> int:
    """Returns the gradient of the last linear of the block, which appears while the MLP's gradients are alive.

    Under autocast its 16-bit copy is freed at the same time.
    """
    last = block.linears[-1]
    if mode.trains:
        cast = mode.types.compute if mode.types.autocast else 0
        return (mode.types.gradient - cast) * last.weight_params
    if last.name in mode.adapted:
        return mode.types.gradient * mode.rank * (last.in_features + last.out_features)
    return 0
