"""Images of a micro-batch: how many positions they are, whether a run sees any, and what is held of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memc.config import Engine, TrainingConfig
from memc.facts.records import Block, ModelFacts, Patches, Sees, Stack
from memc.ledger.bill import Bill
from memc.ledger.entries import Account, Moment

_INPUT_BYTES = 4
_WHOLE_STEP = (
    Moment.FORWARD,
    Moment.LOSS,
    Moment.BACKWARD_FIRST_LAYER,
    Moment.BACKWARD_LAST_LAYER,
    Moment.BACKWARD_EMBEDDING,
    Moment.STEP,
)


@dataclass(frozen=True, slots=True)
class ImageShapes:
    """The images of one sample.

    Attributes:
        images: How many there are.
        patches: Patches of one, where images have any size; else 0.
        positions: Positions of the text that those become.
        window_pairs: Pairs of patches that attend to each other within windows, over all windows of one image.
        window_patches: Patches of the largest window.
    """

    images: int
    patches: int = 0
    positions: int = 0
    window_pairs: int = 0
    window_patches: int = 0

    def variables(self, batch: int) -> dict[str, int]:
        """Returns the shape variables of `batch` samples.

        ``I`` images, ``P`` patches of one and ``M`` positions of the text; ``C`` patches of the largest window; ``PR``
        and ``PQ`` the patches of all images but one and their pairs, ``CR`` and ``CQ`` those of all windows but one.
        """
        images, patches, window = batch * self.images, self.patches, self.window_patches
        return {
            "I": images,
            "P": patches,
            "M": self.positions,
            "C": window,
            "PR": (images - 1) * patches,
            "PQ": (images - 1) * patches * patches,
            "CR": images * patches - window,
            "CQ": images * self.window_pairs - window * window,
        }


def image_shapes(model: ModelFacts, config: TrainingConfig) -> ImageShapes | None:
    """Returns the shapes of a sample's images; None where a model sees none."""
    stack = image_stack(model)
    if stack is None:
        return None
    images = config.images_per_sample if _has_text(model) else 1
    if stack.patches is None:
        return ImageShapes(images)
    high, wide = config.patch_grid(stack.patches.side, stack.patches.merge)
    pairs, largest = _windows(stack.patches, high, wide)
    return ImageShapes(images, high * wide, high * wide // stack.patches.merge**2, pairs, largest)


def _windows(patches: Patches, high: int, wide: int) -> tuple[int, int]:
    """Returns the pairs of patches within windows, and the patches of the largest window.

    Source: transformers vision_utils.py get_vision_window_index: windows at the lower and right edge are smaller.
    """
    if not patches.window:
        return high * wide * high * wide, high * wide
    sides = [_pieces(size, patches.window) for size in (high, wide)]
    rows, columns = sides
    pairs = sum(size * size for size in rows) * sum(size * size for size in columns)
    return pairs, max(rows) * max(columns)


def _pieces(size: int, piece: int) -> list[int]:
    """Returns the lengths of the pieces that a length is cut into."""
    return [piece] * (size // piece) + ([size % piece] if size % piece else [])


def image_stack(model: ModelFacts) -> Stack | None:
    """Returns the stack of a model that sees images; None where none does."""
    return next((stack for stack in model.stacks if stack.sees is Sees.IMAGE), None)


def _has_text(model: ModelFacts) -> bool:
    return model.sees is not Sees.IMAGE


def image_tokens(model: ModelFacts, config: TrainingConfig) -> int:
    """Returns the positions of the text that one image takes; 0 where a model puts none there."""
    stack = image_stack(model)
    if stack is None or not _has_text(model):
        return 0
    if stack.text_positions_per_item is not None:
        return stack.text_positions_per_item
    shapes = image_shapes(model, config)
    assert shapes is not None
    return shapes.positions


def _left_out(stack: Stack) -> Stack:
    """Returns a stack that does not run; its layers still count where every so-manieth is checkpointed."""
    return replace(stack, unused_layers=stack.num_layers, before=None, after=None)


_RUNNING: dict[int, tuple[ModelFacts, ModelFacts]] = {}


def running(model: ModelFacts, config: TrainingConfig) -> ModelFacts:
    """Returns the model that a step runs: without its stack of images where a sample has none, or no room for any."""
    tokens = image_tokens(model, config)
    if not tokens or 0 < config.images_per_sample * tokens < config.local_length:
        return model
    found = _RUNNING.get(id(model))
    if found is None or found[0] is not model:
        others = tuple(_left_out(stack) if stack.sees is Sees.IMAGE else stack for stack in model.other_stacks)
        found = _RUNNING[id(model)] = (model, replace(model, other_stacks=others, before=None))
    return found[1]


def idle_params(model: ModelFacts, config: TrainingConfig) -> int:
    """Returns elements that no gradient reaches: stacks that a step leaves out, layers whose output nothing reads.

    Sharding engines hold gradients and states of them all the same.
    """
    if config.engine not in (Engine.SINGLE, Engine.DDP):
        return 0
    seen = running(model, config)
    if seen is not model:
        return sum(stack.params for stack in seen.other_stacks if stack.unused_layers == stack.num_layers)
    idle = 0
    for stack in model.other_stacks:
        if stack.unused_layers:
            idle += stack.unused_layers * stack.groups[-1].block.params + stack.final_norm.params
    return idle


def idle_adapters(model: ModelFacts, config: TrainingConfig) -> int:
    """Returns elements of adapters that no gradient reaches, as `idle_params`."""
    lora = config.lora
    if lora is None or config.engine not in (Engine.SINGLE, Engine.DDP):
        return 0
    idle = 0
    for stack in running(model, config).other_stacks:
        if stack.unused_layers == stack.num_layers:
            linears = [(one, group.count) for group in stack.groups for one in group.block.linears]
            linears += [(one, 1) for one in stack.linears]
        else:
            linears = [(one, stack.unused_layers) for one in stack.groups[-1].block.linears]
        idle += sum(
            count * lora.rank * (one.in_features + one.out_features)
            for one, count in linears
            if one.name in lora.target_modules and one.adaptable
        )
    return idle


def _recordings(bill: Bill, model: ModelFacts, config: TrainingConfig) -> None:
    """Books the spectrograms of a batch, which a sample has one of. Source: transformers WhisperFeatureExtractor."""
    for stack in model.stacks:
        count = stack.input_elements * config.micro_batch_sequences if stack.sees is Sees.AUDIO else 0
        for moment in _WHOLE_STEP if count else ():
            text = f"{_INPUT_BYTES} B x {count} elements of {config.micro_batch_sequences} recordings"
            bill.add("recordings", Account.ACTIVATIONS, _INPUT_BYTES * count, moment, text.strip, "feature extractors")


def lowest_block(model: ModelFacts) -> Block:
    """Returns the lowest layer that runs."""
    stack = next(stack for stack in model.stacks if stack.unused_layers < stack.num_layers)
    return stack.groups[0].block


def image_entries(bill: Bill, model: ModelFacts, config: TrainingConfig, weight_item: int) -> None:
    """Books the recordings or pixels of a batch, and the rotary tables of their stack.

    A model of images alone holds the pixels in the type of its weights while it runs.
    Source: transformers ViTModel.forward and its like.
    """
    _recordings(bill, model, config)
    shapes, stack = image_shapes(model, config), image_stack(model)
    if shapes is None or stack is None or stack.unused_layers == stack.num_layers:
        return
    images = shapes.images * config.micro_batch_sequences
    count = images * (shapes.patches or 1) * stack.input_elements
    text = f"{_INPUT_BYTES} B x {count} elements of {images} images"
    for moment in _WHOLE_STEP:
        bill.add(
            "pixels", Account.ACTIVATIONS, _INPUT_BYTES * count, moment, lambda: text, "transformers image processors"
        )
    if not _has_text(model) and weight_item != _INPUT_BYTES:
        bill.add(
            "pixels-as-weights",
            Account.ACTIVATIONS,
            weight_item * count,
            Moment.FORWARD,
            lambda: f"{weight_item} B x {count} elements of {images} images",
            "transformers modelling code",
        )
    attention = stack.groups[0].block.attention
    rotary = 2 * 4 * attention.head_dim * images * shapes.patches if attention.rotary else 0
    for moment in _WHOLE_STEP[:-1]:
        bill.add(
            "rotary-tables-of-images",
            Account.ACTIVATIONS,
            rotary,
            moment,
            lambda: f"cos and sin: 2 x 4 B x {attention.head_dim} x {images} images x {shapes.patches} patches",
            "transformers modelling code",
        )
