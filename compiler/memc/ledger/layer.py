"""What one layer keeps for backward, tensor by tensor, in bytes per token; and the mode that decides it."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import Attention, Engine, Method, Task, TrainingConfig
from memc.facts.records import Block
from memc.ledger.blockrun import LayerMode, layer_run, situation
from memc.ledger.dtypes import dtypes
from memc.ledger.image_shapes import ImageShapes
from memc.ledger.peaks import Shapes


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that autograd keeps between forward and backward of a layer.

    Attributes:
        name: What it is.
        bytes_per_token: Its size.
        formula: How that comes about, with the numbers.
    """

    name: str
    bytes_per_token: int
    formula: str


def layer_mode(config: TrainingConfig) -> LayerMode:
    """Returns the layer mode of a configuration."""
    lora = config.lora
    return LayerMode(
        trains=config.method is Method.FULL,
        adapted=frozenset(lora.target_modules) if lora is not None else frozenset(),
        rank=lora.rank if lora is not None else 0,
        dropout=lora is not None and lora.dropout > 0 and config.task is not Task.DPO,  # which TRL trains without
        attention=config.attention,
        mask=config.padding_mask,
        length=config.local_length,
        types=dtypes(config),
        quantized=config.method is Method.QLORA,
        double_quantization=config.double_quantization,
        embedding_trains=lora is not None and (lora.trains_embedding or lora.new_tokens > 0),
        head_item=_head_item(config),
        gradients_stay=config.engine is Engine.SINGLE and config.gradient_accumulation_steps == 1,
    )


def _head_item(config: TrainingConfig) -> int:
    """Returns bytes of one element of the head that adapters' script trains: a copy of it, or one with new rows in it.

    New rows are put into a copy of the frozen weights in every forward, and their gradient is taken out of one of the
    whole: as a weight of the base's type that trains.
    Source: peft tuners/trainable_tokens/layer.py get_merged_weights.
    """
    lora = config.lora
    if lora is None or not (lora.trains_head or lora.new_tokens):
        return 0
    return dtypes(config).adapter if lora.trains_head else dtypes(config).weight


def saved_tensors(block: Block, mode: LayerMode) -> tuple[Saved, ...]:
    """Returns what one layer keeps per token when it is not checkpointed, in the order in which it is made.

    Source: autograd formulas of torch (derivatives.yaml) applied to the block's program.
    """
    shapes = shapes_of(mode, 1)
    run = layer_run(block, mode, situation(block, mode))
    saved = []
    for storage in run.kept:
        size = storage.size * shapes.of(storage.unit) // mode.length
        if size and storage.unit != "1":
            saved.append(Saved(storage.name, size, f"{storage.size} B for each of {storage.unit}"))
    return tuple(saved)


def shapes_of(mode: LayerMode, batch: int, images: ImageShapes | None = None) -> Shapes:
    """Returns the shape variables of a mode with a batch, and those of its images."""
    known = {"B": batch, "T": mode.length, "T+1": mode.length + 1, "r": mode.rank}
    return Shapes(known if images is None else known | images.variables(batch))


def saved_per_token(block: Block, mode: LayerMode) -> int:
    """Returns bytes per token that one layer keeps without checkpointing."""
    return sum(item.bytes_per_token for item in saved_tensors(block, mode))


__all__ = ["Attention", "LayerMode", "Saved", "layer_mode", "saved_per_token", "saved_tensors", "shapes_of"]
