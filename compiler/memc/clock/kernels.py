"""Seconds of single kernels: matrix products by shape, attention by length."""

from __future__ import annotations

from functools import cache

from memc.clock.constants import ClockFacts
from memc.clock.shapes import keys_per_query
from memc.clock.workload import AttentionKernel, Compute
from memc.facts.records import AttentionFacts
from memc.units import ceil_div

_TILES = ((128, 256), (256, 128), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))


@cache
def filled_share(rows: int, columns: int, groups: int, multiprocessors: int) -> float:
    """Returns the share of a card's multiprocessor time that a product's tiles fill, with the best of cuBLAS's tiles.

    A result is cut into tiles, one multiprocessor computes one at a time, and the last wave of tiles may be nearly
    empty; a tile over the edge computes elements that nobody asked for.

    Source: NVIDIA, Matrix Multiplication Background User's Guide (tile and wave quantisation; the tile sizes).
    """
    if not multiprocessors:
        return 1.0
    best = 0.0
    for high, wide in _TILES:
        tiles = ceil_div(rows, high) * ceil_div(columns, wide) * groups
        waves = ceil_div(tiles, multiprocessors)
        best = max(best, rows * columns * groups / (waves * multiprocessors * high * wide))
    return best


def product_seconds(
    rows: int, inner: int, outer: int, facts: ClockFacts, *, size: float = 2.0, groups: int = 1
) -> float:
    """Returns seconds of `groups` products of (rows x inner) by (inner x outer).

    The larger of the time of its multiply-adds, at the rate of the card's tiles, and of reading the operands and
    writing the result once.

    Args:
        rows, inner, outer: Shape of one product; rows of each group.
        facts: Rates.
        size: Bytes per element.
        groups: Products of that shape that run as one kernel.
    """
    if rows <= 0:
        return 0.0
    operations = 2 * rows * inner * outer * groups
    computing = operations / (facts.flops_per_second * filled_share(rows, outer, groups, facts.multiprocessors))
    moved = (rows * inner + inner * outer + rows * outer) * size * groups
    return max(computing, moved / facts.memory_bytes_per_second)


def attention_seconds(attention: AttentionFacts, compute: Compute, facts: ClockFacts) -> tuple[float, float]:
    """Returns seconds of forward and backward of the scores and the weighted sum of one layer.

    Kernels that keep scores on chip compute them again in backward: five products for the forward's two. Eager
    attention keeps them: four products, and every operation on the matrix of scores passes through memory.

    Source: arXiv 2205.14135, 2307.08691 (operations of flash attention); transformers 5.24.0,
        eager_attention_forward (operations of eager).
    """
    share, step = compute.tensor_parallel, facts.attention_width_step
    width = (attention.query_width + attention.value_width) / 2 / share
    tokens = compute.tokens
    if compute.attention is AttentionKernel.EAGER and not attention.linear:
        keys = keys_per_query(attention, compute.context, skips=False, block_keys=0)
        scores = tokens * keys * attention.heads / share / facts.memory_bytes_per_second
        products = 4 * tokens * keys * width / facts.flops_per_second
        capped = attention.logit_softcap is not None
        back = max(2 * products, 10 * scores) + (_EAGER_BACKWARD_BYTES + _CAP_BACKWARD_BYTES * capped) * scores
        return max(products, 4 * scores) + (_EAGER_FORWARD_BYTES + _CAP_FORWARD_BYTES * capped) * scores, back
    skips = compute.attention is not AttentionKernel.MASKED
    keys = keys_per_query(attention, compute.context, skips=skips, block_keys=facts.attention_block_keys)
    forward_rate, backward_rate = facts.attention_rates[compute.attention.value]
    padded = ceil_div(attention.head_dim, step) * step / attention.head_dim
    operations = 4 * tokens * keys * width * padded
    read = 2.0 * tokens * (2 * width + 2 * attention.key_width / share)
    forward = max(operations / forward_rate, read / facts.memory_bytes_per_second)
    backward = max(2.5 * operations / backward_rate, 2.5 * read / facts.memory_bytes_per_second)
    return forward, backward


# Of one score, beside what the products read and write: scaled (4), masked (4), softmax in fp32 (6), cast back (6).
_EAGER_FORWARD_BYTES = 20
# The cast (6), softmax from its result and gradient (12), the scale (4).
_EAGER_BACKWARD_BYTES = 22
# A cap on the scores: divided (4), tanh (4), multiplied (4); back: two factors (4 each), tanh from its result (6).
_CAP_FORWARD_BYTES = 12
_CAP_BACKWARD_BYTES = 14
