"""Floating point operations of one micro-batch on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from memc.clock.shapes import keys_per_query, products_of
from memc.clock.workload import AttentionKernel, compute_of
from memc.config import TrainingConfig
from memc.facts.records import AttentionFacts, ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Operations of one micro-batch on one GPU; a multiply-add counts as two.

    Attributes:
        forward: Matrix products and attention of the forward pass.
        backward: Of the backward pass.
        recompute: Of the forward passes that checkpointing repeats.
    """

    forward: int
    backward: int
    recompute: int

    @property
    def total(self) -> int:
        """All three."""
        return self.forward + self.backward + self.recompute


def micro_batch_flops(model: ModelFacts, config: TrainingConfig) -> Flops:
    """Returns the operations of one micro-batch.

    Full training computes input and weight gradients (twice the forward); frozen weights only need input gradients
    (once). Flash and memory-efficient attention recompute scores in backward (2.5 times the forward); eager keeps
    them (twice). Causal kernels skip half of the scores, eager and those that are given a mask do not; a sliding
    window bounds the keys per query. Of routed experts those count that a token is sent to.

    Source: arXiv 2001.08361 (2 per parameter and token), arXiv 2205.14135 and 2307.08691 (attention).
    """
    compute = compute_of(config)
    eager = compute.attention is AttentionKernel.EAGER
    skips = compute.attention not in (AttentionKernel.EAGER, AttentionKernel.MASKED)
    layers = adapters = attention = 0.0
    for group in model.groups:
        for product in products_of(group.block, model.hidden_size, compute):
            layers += 2 * product.inner * product.outer * product.rows_per_token * group.count
            if product.adapted:
                adapters += 2 * compute.rank * (product.inner + product.outer) * group.count
        attention += _scores(group.block.attention, compute.context, skips=skips) * group.count
    head = 2 * model.vocab_size * model.hidden_size
    trains = 2 if compute.trains else 1
    backward = trains * (layers + head) + 2 * adapters + (2 if eager else 2.5) * attention
    backward += head if compute.chunked_loss else 0
    forward = layers + attention + adapters
    tokens = compute.tokens
    return Flops(
        forward=int((forward + head) * tokens),
        backward=int(backward * tokens),
        recompute=int(forward * compute.recompute * tokens),
    )


def _scores(attention: AttentionFacts, context: int, *, skips: bool) -> float:
    """Returns operations per token of the scores and the weighted sum of one layer, without a kernel's blocks."""
    width = (attention.query_width + attention.value_width) / 2
    return 4 * width * keys_per_query(attention, context, skips=skips, block_keys=1)
