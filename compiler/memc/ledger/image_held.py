"""What a model returns of the images it has seen: it lives beside the text until the loss has been computed."""

from __future__ import annotations

from dataclasses import replace

from memc.config import TrainingConfig
from memc.facts.records import ModelFacts, Stack
from memc.ledger.bill import Bill
from memc.ledger.blockrun import LayerMode, layer_run, situation
from memc.ledger.entries import Account, Moment
from memc.ledger.image_shapes import image_stack, image_tokens
from memc.ledger.peaks import Shapes
from memc.ledger.places import unit_of


def tower_bytes(
    model: ModelFacts, config: TrainingConfig, mode: LayerMode, shapes: Shapes, reaches: bool, item: int
) -> int:
    """Returns the bytes of a tower's last layer and of the features made of it, and what layers beyond those keep.

    Source: transformers LlavaModelOutputWithPast.image_outputs and its like: the outputs of the tower are among those
        of the model, which Trainer.compute_loss holds until it returns.

    Args:
        model: The model, as a step runs it.
        config: The configuration.
        mode: The mode.
        shapes: Shape variables of a micro batch.
        reaches: Whether the tower's output needs a gradient.
        item: Bytes of one element of it.
    """
    stack = image_stack(model)
    if stack is None or not model.other_stacks or stack.unused_layers == stack.num_layers or not model.vocab_size:
        return 0
    positions = shapes.of(unit_of(stack))
    features = shapes.variables["I"] * image_tokens(model, config) * model.hidden_size * mode.types.compute
    return item * stack.hidden_size * positions + 2 * features + _beyond(stack, config, mode, shapes, reaches, item)


def _beyond(stack: Stack, config: TrainingConfig, mode: LayerMode, shapes: Shapes, reaches: bool, item: int) -> int:
    """Returns what layers keep whose output nothing reads, and the weight copies that autocast makes for them."""
    kept = 0
    for number in range(stack.num_layers - stack.unused_layers, stack.num_layers):
        block = stack.groups[-1].block
        around = situation(block, mode, batch=shapes.variables["I"], input_needs_grad=reaches, input_item=item)
        run = layer_run(block, mode, replace(around, unit=unit_of(stack)))
        kept += run.cached_casts.bytes(shapes)
        if config.checkpoint_every and number % config.checkpoint_every == 0:
            kept += run.input.bytes(shapes)
        else:
            kept += sum(storage.size * shapes.of(storage.unit) for storage in run.kept)
    return kept


def returned_entry(bill: Bill, size: int, last: Moment) -> None:
    """Books what the model returns of images, while the text model runs and, where the loss peaks forward, there."""
    for moment in dict.fromkeys((Moment.FORWARD, last)):
        bill.add(
            "returned-of-images",
            Account.ACTIVATIONS,
            size,
            moment,
            lambda: f"{size} B of the tower's output, features made of it, and layers whose output nothing reads",
            "transformers modelling outputs, Trainer.compute_loss",
        )
