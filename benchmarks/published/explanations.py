"""Why a comparison misses: which condition a record does not say, or which term the ledger lacks."""

from __future__ import annotations

from collections.abc import Callable

from memc.config import Engine, Offload, TrainingConfig
from memc.facts.records import Component

from published.judging import Outcome
from published.readings import Metric

_NEAR_CAPACITY = 0.8
_SMALL_BYTES = 6 * 2**30


def explanation(item: Outcome) -> str:
    """Returns the first explanation that fits a comparison, as the end of a sentence."""
    if item.pinned is None:
        return "what the benchmark keeps around the operation is not all known"
    return next((text for holds, text in _EXPLANATIONS if holds(item)), "a term is missing that is not known")


def _config(item: Outcome) -> TrainingConfig:
    assert item.pinned is not None
    return item.pinned.config


def _offloads(item: Outcome) -> bool:
    return _config(item).offload_param is not Offload.NONE


def _near_capacity(item: Outcome) -> bool:
    assert item.pinned is not None
    capacity = item.pinned.gpu.capacity_bytes
    reserved = item.metric is not Metric.ALLOCATED
    return bool(reserved and capacity and (item.published_bytes or 0) > _NEAR_CAPACITY * capacity)


def _small(item: Outcome) -> bool:
    return item.metric is not Metric.ALLOCATED and (item.published_bytes or 0) < _SMALL_BYTES


def _experts(item: Outcome) -> bool:
    assert item.pinned is not None
    blocks = [group.block for group in item.pinned.model.groups]
    return any(tensor.component is Component.EXPERTS for block in blocks for tensor in block.tensors)


def _litgpt_sharded(item: Outcome) -> bool:
    assert item.pinned is not None
    return bool(item.pinned.software.modelling == "litgpt" and _config(item).engine is Engine.FSDP)


_EXPLANATIONS: tuple[tuple[Callable[[Outcome], bool], str], ...] = (
    (_offloads, "when shards come from the host and go back is not modelled"),
    (_near_capacity, "near the card's size, cached segments are given back and asked for again in an order not known"),
    (_small, "what the card held before the step is no small part of so little"),
    (_experts, "experts were linears of their own in that version; they are priced as one grouped product"),
    (_litgpt_sharded, "whether the sharded model's output is turned to fp32 is not known"),
    (lambda item: item.metric is not Metric.ALLOCATED, "order and sizes of allocations are replayed, not traced"),
)
