"""Every operation that a block's program can call."""

from __future__ import annotations

from memc.ledger import (
    alibi,
    attention_kernels,
    biases,
    disentangled,
    images,
    latent,
    losses,
    math_attention,
    operations,
    padded_experts,
    pieces,
    pooling,
    products,
    routing,
    sinks,
)

OPERATIONS = operations.OPERATIONS
"""Operations by the name that programs call them by."""

MODULES = (
    operations,
    products,
    attention_kernels,
    math_attention,
    alibi,
    routing,
    padded_experts,
    pieces,
    sinks,
    latent,
    biases,
    disentangled,
    images,
    losses,
    pooling,
)
"""Where they are defined."""

__all__ = ["MODULES", "OPERATIONS"]
