"""The batch of one micro-step: the longest samples that a configuration allows, with all that the model takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memc.config import Task, TrainingConfig
from memc.trace.build import uses_autocast

_LABEL = 5
_TOKEN = 6


@dataclass(frozen=True)
class Batch:
    """The inputs of a model, by name, and what was assumed about them."""

    tensors: dict[str, Any]
    assumes: tuple[str, ...] = ()


def batch_for(config: TrainingConfig, model: Any) -> Batch:
    """Returns a micro-batch of full-length samples in which every label counts.

    Assumes: image models see images at the size of their config, or as square as `image_pixels` allow.
    """
    settings = model.config
    if model.main_input_name == "input_features":
        return _speech(config, settings, torch.float32 if uses_autocast(config) else model.dtype)
    if model.main_input_name == "pixel_values" and not hasattr(settings, "text_config"):
        return _labelled_images(config, settings)
    if settings.model_type == "clip":
        return _image_text_pairs(config, settings)
    if hasattr(settings, "vision_config"):
        return _text_with_images(config, model)
    text = _text(config, _longest(config, model))
    if settings.is_encoder_decoder:
        return Batch(text, ("source and target both have max_length tokens",))
    return Batch(text)


def _longest(config: TrainingConfig, model: Any) -> int:
    """Returns the tokens per sample: max_length, or what a table of learned positions allows."""
    longest: int = config.local_length
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and "position" in name:
            rows = getattr(model.config, "max_position_embeddings", module.num_embeddings)
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            longest = min(longest, rows - unused)
    return longest


def _text(config: TrainingConfig, length: int) -> dict[str, Any]:
    shape = (config.micro_batch_sequences, length)
    batch: dict[str, Any] = {
        "input_ids": torch.full(shape, _TOKEN, dtype=torch.long),
        "labels": torch.full(shape, _LABEL, dtype=torch.long),
    }
    if config.task is Task.CLASSIFICATION:
        batch["labels"] = torch.zeros(shape[0], dtype=torch.long)
    if config.padding_mask:
        mask = torch.ones(shape, dtype=torch.long)
        mask[:, -1] = 0
        batch["attention_mask"] = mask
    return batch


def _speech(config: TrainingConfig, settings: Any, dtype: torch.dtype) -> Batch:
    frames = 2 * settings.max_source_positions
    length = min(config.local_length, settings.max_target_positions)
    features = torch.zeros(config.micro_batch_size, settings.num_mel_bins, frames, dtype=dtype)
    labels = torch.full((config.micro_batch_size, length), _LABEL, dtype=torch.long)
    return Batch({"input_features": features, "labels": labels}, (f"recordings have {frames} frames",))


def _pixels(config: TrainingConfig, vision: Any) -> torch.Tensor:
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.zeros(config.micro_batch_size, vision.num_channels, height, width)


def _labelled_images(config: TrainingConfig, settings: Any) -> Batch:
    labels = torch.zeros(config.micro_batch_size, dtype=torch.long)
    return Batch({"pixel_values": _pixels(config, settings), "labels": labels})


def _image_text_pairs(config: TrainingConfig, settings: Any) -> Batch:
    length = min(config.local_length, settings.text_config.max_position_embeddings)
    tokens = _text(config, length)
    del tokens["labels"]
    return Batch({**tokens, "pixel_values": _pixels(config, settings.vision_config), "return_loss": True})


def _text_with_images(config: TrainingConfig, model: Any) -> Batch:
    """Returns text that begins with the images of each sample; text only where there are none or no room for them."""
    settings = model.config
    text = _text(config, config.local_length)
    vision = settings.vision_config
    dynamic = hasattr(vision, "spatial_merge_size")
    high = wide = 0
    if dynamic:
        high, wide = config.patch_grid(vision.patch_size, vision.spatial_merge_size)
        tokens = high * wide // vision.spatial_merge_size**2
    else:
        tokens = _fixed_image_tokens(settings, vision)
    number = config.images_per_sample
    if not number:
        return Batch(text, ("text only",))
    if number * tokens >= config.local_length:
        return Batch(text, (f"text only: {_images(number, tokens)} not fit in max_length",))
    ids = text["input_ids"]
    ids[:, : number * tokens] = settings.image_token_id
    kinds = torch.zeros_like(ids)
    kinds[:, : number * tokens] = 1
    extra: dict[str, Any] = {}
    images = number * config.micro_batch_size
    if dynamic:
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        extra["pixel_values"] = torch.zeros(images * high * wide, patch)
        extra["image_grid_thw"] = torch.tensor([[1, high, wide]] * images)
        extra["mm_token_type_ids"] = kinds
    else:
        extra["pixel_values"] = _pixels(config, vision).repeat(number, 1, 1, 1)
        if settings.model_type == "gemma3":
            extra["token_type_ids"] = kinds
    what = f"one image of {tokens} tokens" if number == 1 else f"{number} images of {tokens} tokens each"
    return Batch({**text, **extra}, (f"{what} per sample, inside max_length",))


def _images(number: int, tokens: int) -> str:
    return f"an image of {tokens} tokens does" if number == 1 else f"{number} images of {tokens} tokens each do"


def _fixed_image_tokens(settings: Any, vision: Any) -> int:
    """Returns the tokens that one image of the config's size takes in the text."""
    per_image = getattr(settings, "mm_tokens_per_image", None)
    if per_image:
        return int(per_image)
    patches = (vision.image_size // vision.patch_size) ** 2
    ratio = getattr(vision, "pixel_shuffle_ratio", 1)
    return int(patches * ratio**2)
