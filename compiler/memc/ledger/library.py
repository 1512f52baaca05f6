"""Every operation that a block's program can call."""

from __future__ import annotations

from memc.ledger import alibi, attention_kernels, biases, latent, losses, operations, products, routing, sinks

OPERATIONS = operations.OPERATIONS
"""Operations by the name that programs call them by."""

MODULES = (operations, products, attention_kernels, routing, sinks, latent, biases, losses, alibi)
"""Where they are defined."""

__all__ = ["MODULES", "OPERATIONS"]
