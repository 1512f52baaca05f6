"""Images of a spec: how many a sample has, how large they are, and the tokens that they add to its text."""

from __future__ import annotations

from dataclasses import replace

from memc.config import TrainingConfig, patch_grid
from memc.errors import Diagnostic
from memc.facts.records import ModelFacts, Objective, Sees, Stack
from memc.ledger.estimate import Estimator
from memc.spec import Data, LoadedSpec, Spec
from memc.units import format_gib

_UNUSED_PIXELS = 448 * 448


def image_tower(model: ModelFacts) -> Stack | None:
    """Returns the stack of a model of text that sees images; None where it sees none."""
    return next((stack for stack in model.other_stacks if stack.sees is Sees.IMAGE), None)


def skipped_stacks(spec: Spec, model: ModelFacts) -> tuple[str, ...]:
    """Returns the stacks that carry no adapter: the tower of a model that sees images, unless it is asked for."""
    tower = image_tower(model)
    seen = model.objective is Objective.IMAGE_TEXT_LM and tower is not None
    return (tower.name,) if seen and tower is not None and not spec.lora.image_tower else ()


def image_settings(data: Data, model: ModelFacts) -> tuple[int, int]:
    """Returns the images of one sample and the pixels of one.

    A sample of a model that sees images has one unless the spec says otherwise; an image has as many pixels as the
    model's own processor lets it have.
    """
    tower = image_tower(model)
    images = data.images_per_sample if data.images_per_sample is not None else 1
    if tower is None or tower.patches is None:
        return images, _UNUSED_PIXELS
    return images, min(data.image_pixels or tower.patches.most_pixels, tower.patches.most_pixels)


def image_tokens_of(data: Data, model: ModelFacts) -> int:
    """Returns the tokens that the images of one sample take in the text."""
    tower = image_tower(model)
    if tower is None:
        return 0
    images, pixels = image_settings(data, model)
    if tower.text_positions_per_item is not None:
        return images * tower.text_positions_per_item
    patches = tower.patches
    assert patches is not None
    high, wide = patch_grid(pixels, patches.side, patches.merge)
    return images * (high * wide // patches.merge**2)


def sequence_tokens(data: Data, model: ModelFacts) -> int:
    """Returns the longest sequence: `max_length` tokens of text, and those of images."""
    return data.max_length + image_tokens_of(data, model)


def image_contradictions(loaded: LoadedSpec, model: ModelFacts) -> list[Diagnostic]:
    """Returns what the spec says of images and the model forbids."""
    data, tower, found = loaded.spec.data, image_tower(model), []
    for field, given in (("images_per_sample", data.images_per_sample), ("image_pixels", data.image_pixels)):
        if tower is None and given:
            found.append(
                loaded.diagnostic(
                    f"data.{field}",
                    "images-not-seen",
                    f"{model.key} ({model.model_type}) sees no images beside its text",
                    f"remove data.{field}, or choose a model that sees images",
                )
            )
    if tower is None and loaded.spec.lora.image_tower:
        found.append(
            loaded.diagnostic(
                "lora.image_tower",
                "images-not-seen",
                f"{model.key} ({model.model_type}) has no tower that sees images beside its text",
                "remove lora.image_tower, or choose a model that sees images",
            )
        )
    if tower is not None and tower.patches is None and data.image_pixels is not None:
        found.append(
            loaded.diagnostic(
                "data.image_pixels",
                "image-size-fixed",
                f"{model.key} ({model.model_type}) resizes every image to {tower.text_positions_per_item} tokens",
                "remove data.image_pixels",
            )
        )
    if tower is not None and data.packing and data.images_per_sample != 0:
        found.append(
            loaded.diagnostic(
                "data.packing",
                "images-not-packed",
                "samples with images cannot share a sequence: TRL refuses to pack them",
                "set data.packing to false, or data.images_per_sample to 0 for text alone",
            )
        )
    return found


def image_share(estimator: Estimator, config: TrainingConfig, data: Data) -> list[str]:
    """Returns what images take of a GPU's memory: the difference to the same settings on text alone."""
    tokens = image_tokens_of(data, estimator.model)
    if not tokens:
        return []
    alone = replace(config, images_per_sample=0, max_length=data.max_length)
    need = estimator.price(config).gpu_required_bytes
    share = need - estimator.price(alone).gpu_required_bytes
    return [
        f"images take {format_gib(share)} of the {format_gib(need)} that each GPU needs: on text alone, without their "
        "tokens, the same settings need the rest"
    ]


def image_assumptions(data: Data, model: ModelFacts) -> tuple[str, ...]:
    """Returns sentences about images that the spec left open."""
    tower = image_tower(model)
    if tower is None or data.images_per_sample == 0:
        return ()
    tokens, found = image_tokens_of(data, model), []
    if data.images_per_sample is None:
        found.append("data.images_per_sample is not given: every sample has one image")
    if tower.patches is not None and data.image_pixels is None:
        most = tower.patches.most_pixels
        found.append(
            f"data.image_pixels is not given: an image may have the {most:,} pixels that the model's own processor "
            f"allows, so a sample's images take {tokens:,} tokens beside max_length"
        )
    else:
        found.append(f"a sample's images take {tokens:,} tokens beside max_length")
    return tuple(found)
