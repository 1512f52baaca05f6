"""Floating point operations of one micro-batch on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import Attention, Method, TrainingConfig
from memc.facts.records import ModelFacts
from memc.units import ceil_div


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
    them (twice). Causal kernels skip half of the scores, eager does not; a sliding window bounds the keys per query.

    Source: arXiv 2001.08361 (2 per parameter and token), arXiv 2205.14135 and 2307.08691 (attention).
    """
    tokens, length = config.micro_batch_tokens, config.max_length
    eager = config.attention is Attention.EAGER
    layers = attention = adapters = 0
    for group in model.groups:
        block = group.block
        layers += 2 * sum(linear.weight_params for linear in block.linears) * group.count
        window = block.attention.sliding_window
        keys = length if window is None or eager else min(length, 2 * window)
        scores = 4 * block.attention.query_width * (keys if eager else ceil_div(keys, 2))
        attention += scores * group.count
        if config.lora is not None:
            targets = frozenset(config.lora.target_modules)
            widths = sum(lin.in_features + lin.out_features for lin in block.linears if lin.name in targets)
            adapters += 2 * config.lora.rank * widths * group.count
    head = 2 * model.vocab_size * model.hidden_size
    chunked_again = head if config.loss.value == "chunked" else 0
    trains = config.method is Method.FULL
    backward = (2 if trains else 1) * (layers + head) + chunked_again + 2 * adapters
    backward += 2 * attention if eager else 5 * attention // 2
    forward_layers = layers + attention + adapters
    every = config.checkpoint_every
    repeated = forward_layers * ceil_div(model.num_layers, every) // model.num_layers if every else 0
    return Flops(forward=(forward_layers + head) * tokens, backward=backward * tokens, recompute=repeated * tokens)
