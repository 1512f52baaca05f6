"""What is traced: one configuration of one model, and what a trace cannot see of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memc.config import Attention, Engine, Offload, TrainingConfig
from memc.document import record_document
from memc.facts import GpuFacts, load_fact, load_model_config

_INTERVAL = "ledger.trace_interval_share"


@dataclass(frozen=True)
class Request:
    """One configuration to trace.

    Attributes:
        config: The configuration.
        model: The fields of the model's config.json.
        compute_capability: Of the card, which decides the kernels; None for one that runs no CUDA.
        multiprocessors: Of the card; None when unknown: those of the largest are taken.
    """

    config: TrainingConfig
    model: dict[str, Any]
    compute_capability: tuple[int, int] | None
    multiprocessors: int | None


def trace_request(config: TrainingConfig, model: str, base_dir: Path, gpu: GpuFacts) -> Request:
    """Returns the request for a model that is named as in a spec, on a card.

    Raises:
        MemcError: As `load_model_config`.
    """
    fields = load_model_config(model, base_dir=base_dir)
    return Request(config, fields, gpu.compute_capability, gpu.multiprocessors)


def request_digest(request: Request) -> str:
    """Returns the SHA-256 of all that decides what a trace finds, library versions and the trace itself aside."""
    card = [request.compute_capability, request.multiprocessors]
    asked = {"settings": record_document(request.config), "model": request.model, "card": card}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def untraceable(request: Request) -> str:
    """Returns what a trace of one process cannot see of a configuration; empty when it sees the whole step."""
    config = request.config
    if request.compute_capability is None:
        return "only the kernels of CUDA are known to the trace"
    if config.engine is Engine.DDP:
        return "the gradient buckets of DistributedDataParallel are not traced"
    if config.engine is not Engine.SINGLE:
        return f"what {config.engine.value} shards, gathers and keeps of its own is not traced"
    if config.context_parallel > 1:
        return "ranks that share a sequence are not traced"
    if config.attention is Attention.FLASH_ATTENTION_2:
        return "the buffers of the flash-attn package are not traced"
    return ""


def offloads(config: TrainingConfig) -> bool:
    """Returns whether parameters or states lie outside the GPU."""
    zero, fsdp = config.zero, config.fsdp
    places = [zero.offload_optimizer, zero.offload_param] if zero is not None else []
    places += [fsdp.offload] if fsdp is not None else []
    return any(place is not Offload.NONE for place in places)


def interval_share() -> float:
    """Returns the part of a peak by which closed forms may be off from the trace before they count as wrong."""
    return float(load_fact(_INTERVAL).value)
