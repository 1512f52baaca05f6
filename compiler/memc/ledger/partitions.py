"""What ranks hold of flat gradients that are cut between them, when they hold them by whole parameters.

Parameters follow each other in one flat buffer, cut into equal parts. A cut goes through a parameter, and both ranks
beside it hold that parameter's gradient whole; so does every rank whose part lies within a large one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from memc.config import LoraConfig, TrainingConfig
from memc.facts.records import Block, ModelFacts
from memc.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Elements of gradients on the rank that has most of them at a time.

    Attributes:
        own: Of parameters that lie in its part, at least partly.
        last: The same of the last rank, whose part comes first in backward.
        kept: Those, and the parameters above the bucket's size that lie in other parts.
        kept_with_lowest: The same where the first parameter, the last in backward, exists a second time beside its
            place in the part.
    """

    own: int
    last: int
    kept: int
    kept_with_lowest: int


_KNOWN: dict[int, tuple[ModelFacts, dict[LoraConfig | None, tuple[int, ...]]]] = {}


def trained_matrices(model: ModelFacts, config: TrainingConfig) -> tuple[int, ...]:
    """Returns the elements of each trained matrix in the order in which modules register them.

    Assumes: the input embedding, the layers' linears and experts in their order, modules behind the layers, the head.
    """
    known = _KNOWN.get(id(model))
    if known is None or known[0] is not model:
        known = _KNOWN[id(model)] = (model, {})
    if config.lora not in known[1]:
        known[1][config.lora] = _all_matrices(model, config)
    return known[1][config.lora]


def _all_matrices(model: ModelFacts, config: TrainingConfig) -> tuple[int, ...]:
    blocks = {id(group.block): _block_matrices(group.block, config) for group in model.groups}
    found = [size for group in model.groups for _ in range(group.count) for size in blocks[id(group.block)]]
    if config.lora is not None:
        return tuple(found)
    outside = [linear.weight_params for linear in model.outer_linears]
    return tuple(size for size in (model.embedding_params, *found, *outside, model.head_params) if size)


def _block_matrices(block: Block, config: TrainingConfig) -> list[int]:
    if config.lora is None:
        sizes = [linear.weight_params for linear in block.linears]
        return sizes + [tensor.params for tensor in block.tensors if tensor.trains]
    targets, rank = frozenset(config.lora.target_modules), config.lora.rank
    return [
        rank * side
        for linear in block.linears
        if linear.name in targets and linear.adaptable
        for side in (linear.in_features, linear.out_features)
    ]


@cache
def sub_groups(matrices: tuple[int, ...], ranks: int, limit: int) -> tuple[int, ...]:
    """Returns this rank's elements of each of the groups that ZeRO-3 steps through one after the other.

    Args:
        matrices: Elements of each parameter, in order; each is cut into `ranks` parts.
        ranks: Parts.
        limit: Elements of a part of a group, which the parameter that reaches them ends.

    Source: DeepSpeed runtime/zero/stage3.py _create_fp16_sub_groups.
    """
    found, current = [], 0
    for size in matrices:
        current += ceil_div(size, ranks)
        if current >= limit:
            found.append(current)
            current = 0
    return (*found, current) if current else tuple(found)


def largest_sub_group(matrices: tuple[int, ...], ranks: int, limit: int) -> int:
    """Returns the largest of `sub_groups`; arguments are theirs."""
    return max(sub_groups(matrices, ranks, limit), default=0)


@cache
def holdings(matrices: tuple[int, ...], ranks: int, bucket: int) -> Holdings:
    """Returns what the fullest rank holds of gradients.

    Args:
        matrices: Elements of each parameter, in order.
        ranks: Parts of the flat buffer.
        bucket: Elements of a reduction bucket: what is larger is reduced where it lies.

    Source: DeepSpeed runtime/zero/stage_1_and_2.py copy_grads_in_partition (whole parameters of the part, in one
        buffer), reduce_independent_p_g_buckets_and_remove_grads (what fits a bucket moves into it).
    """
    total = sum(matrices)
    share = ceil_div(total, ranks)
    above = sum(size for size in matrices if size > bucket)
    lowest = matrices[0] if matrices and matrices[0] > bucket else 0
    own = last = kept = with_lowest = 0
    first = first_start = 0
    for rank in range(min(ranks, total)):
        start, stop = rank * share, min((rank + 1) * share, total)
        if start >= stop:
            break
        while first_start + matrices[first] <= start:
            first_start += matrices[first]
            first += 1
        index, end, large = first, first_start, 0
        while end < stop:
            end += matrices[index]
            large += matrices[index] if matrices[index] > bucket else 0
            index += 1
        last = end - first_start
        outside = above - large
        own = max(own, last)
        kept = max(kept, last + outside - (lowest if first else 0))
        with_lowest = max(with_lowest, last + outside + (0 if first else lowest))
    return Holdings(own=own, last=last, kept=kept, kept_with_lowest=with_lowest)
