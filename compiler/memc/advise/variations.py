"""Variations of a spec: another length, micro-batch, model, card or number of cards, everything else as asked."""

from __future__ import annotations

from memc.config import Task
from memc.spec import Spec


def with_length(spec: Spec, max_length: int) -> Spec:
    """Returns the spec with another `data.max_length`; samples that are longer are cut, so their mean is too."""
    data = spec.data
    mean = data.mean_tokens
    if mean is not None and not (spec.task is Task.PRETRAIN and data.packing):
        mean = min(mean, max_length)
    return spec.model_copy(update={"data": data.model_copy(update={"max_length": max_length, "mean_tokens": mean})})


def with_micro_batch(spec: Spec, size: int) -> Spec:
    """Returns the spec with a pinned micro-batch; accumulation follows from the global batch."""
    pin = spec.pin.model_copy(update={"micro_batch_size": size, "gradient_accumulation_steps": None})
    return spec.model_copy(update={"pin": pin})


def with_model(spec: Spec, key: str) -> Spec:
    """Returns the spec with another model."""
    return spec.model_copy(update={"model": key})


def with_count(spec: Spec, count: int, nodes: int = 1) -> Spec:
    """Returns the spec with another number of cards in each node, and of nodes."""
    return spec.model_copy(update={"hardware": spec.hardware.model_copy(update={"count": count, "nodes": nodes})})


def with_card(spec: Spec, key: str, *, usd_per_gpu_hour: float | None = None) -> Spec:
    """Returns the spec with another card, the whole of it but the reserve usable.

    `memory.target` and `hardware.usd_per_gpu_hour` say something of the spec's own card: they do not go along.
    """
    hardware = spec.hardware.model_copy(update={"gpu": key, "usd_per_gpu_hour": usd_per_gpu_hour})
    memory = spec.memory.model_copy(update={"target": None})
    return spec.model_copy(update={"hardware": hardware, "memory": memory})


def without_limit(spec: Spec) -> Spec:
    """Returns the spec without a budget of time or money."""
    return spec.model_copy(update={"time": spec.time.model_copy(update={"budget": None})})
