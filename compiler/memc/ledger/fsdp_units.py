"""How FSDP divides a model into what is gathered and reduced together, and the types it keeps shards in.

Version 2 as accelerate sets it up: each layer is a unit, the input embedding another, the final norm and the head a
third that stays gathered from its forward to its backward; a tied embedding belongs to that third. Version 1 wraps the
layers and leaves everything else to the root, which stays gathered for the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import AdapterPrecision, Method, Precision, Quantization, TrainingConfig
from memc.facts.records import Block, Component, ModelFacts
from memc.ledger.dtypes import dtypes
from memc.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What is gathered and reduced together, in bytes of the gathered form; adapters count with their layer.

    Attributes:
        layer: The largest layer, base and adapters.
        layer_gradient: Gradients of what trains of it.
        layers: All layers of the main stack.
        embedding: The input embedding, when it is a unit of its own.
        tail: The final norm and the head, with the embedding when it shares the head's tensor.
        root: Everything else; gathered for the whole step.
    """

    layer: int
    layer_gradient: int
    layers: int
    embedding: int
    tail: int
    root: int


def adapter_params(block: Block, config: TrainingConfig) -> int:
    """Returns the adapter elements of one layer."""
    if config.lora is None:
        return 0
    targets, rank = frozenset(config.lora.target_modules), config.lora.rank
    return sum(
        rank * (lin.in_features + lin.out_features) for lin in block.linears if lin.name in targets and lin.adaptable
    )


def _layer_bytes(block: Block, config: TrainingConfig, size: int) -> int:
    """Returns the bytes of one gathered layer: of a 4-bit base the codes, everything else in the compute type."""
    linears = sum(linear.weight_params for linear in block.linears)
    if config.quantization is Quantization.GPTQ:
        linears += sum(tensor.params for tensor in block.tensors if tensor.component is Component.EXPERTS)
    codes = ceil_div(linears, 2) if config.method is Method.QLORA else size * linears
    return codes + size * (block.params - linears + adapter_params(block, config))


def units(model: ModelFacts, config: TrainingConfig) -> Units:
    """Returns how FSDP divides a model.

    Source: accelerate utils/fsdp_utils.py: layers by class, then the input embedding, then final norm and head.
    """
    size, full = dtypes(config).compute, config.lora is None
    sizes = [(_layer_bytes(group.block, config, size), group) for group in model.groups]
    layer, largest = max(sizes, key=lambda item: item[0])
    outside = model.total_params - sum(group.block.params * group.count for group in model.groups)
    tail = model.final_norm.params + (model.embedding_params if model.tied else model.head_params)
    embedding = 0 if model.tied else model.embedding_params
    mixed = config.fsdp is not None and config.fsdp.version == 1 and config.fsdp.mixed_units
    if config.fsdp is not None and config.fsdp.version == 1:
        tail = embedding = 0
    return Units(
        layer=layer,
        layer_gradient=layer if full or mixed else size * adapter_params(largest.block, config),
        layers=sum(gathered * group.count for gathered, group in sizes),
        embedding=size * embedding,
        tail=size * tail,
        root=size * (outside - tail - embedding),
    )


def stored_bytes(config: TrainingConfig) -> int:
    """Returns bytes per trainable element of a shard and of its gradient.

    Source: accelerate turns trainable parameters to fp32 under mixed precision, unless some are 4-bit; FSDP keeps the
        shard's type for the reduced gradient.
    """
    if config.precision is Precision.BF16_PURE:
        return dtypes(config).gradient
    if config.method is Method.QLORA and config.lora is not None:
        return 4 if config.lora.precision is AdapterPrecision.FP32 else 2
    return 4
