"""What each setting touches: the numbers that training computes, or only where bytes lie and how long a step takes."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from memc.config import Optimizer
from memc.ladder import LADDER, Dimension, Fidelity


class Touch(StrEnum):
    """What a change of a setting does to a run."""

    NUMERICS = "changes numerics"
    MEMORY = "only memory"
    NEITHER = "neither"
    UNKNOWN = "unknown"


DIMENSION_SETTINGS: dict[Dimension, tuple[str, ...]] = {
    Dimension.METHOD: ("method",),
    Dimension.STATES: ("optimizer", "precision"),
    Dimension.SHARDING: ("engine", "zero", "zero_stage", "fsdp"),
    Dimension.OFFLOAD_OPTIMIZER: ("offload_optimizer",),
    Dimension.OFFLOAD_PARAM: ("offload_param",),
    Dimension.ENGINE_STATES: ("zero.bf16_master_weights", "zero.bf16_states"),
    Dimension.ADAPTERS: ("lora.precision",),
    Dimension.PRODUCTS: (),
    Dimension.CONTEXT: ("context_parallel",),
    Dimension.LOSS: ("loss",),
    Dimension.REFERENCE: ("reference",),
    Dimension.CHECKPOINTING: ("checkpoint_every", "activation_checkpointing"),
    Dimension.CHECKPOINT_OFFLOAD: ("checkpoint_offload",),
    Dimension.MICRO_BATCH: ("micro_batch_size", "gradient_accumulation_steps", "eval_batch_size", "padding_mask"),
}
"""The settings that techniques decide, by dimension. Sections stand for everything below them."""

_OTHER_SETTINGS: dict[Touch, tuple[str, ...]] = {
    Touch.NUMERICS: (
        "task",
        "images_per_sample",
        "image_pixels",
        "classes",
        "max_length",
        "packing",
        "base_precision",
        "quantization",
        "double_quantization",
        "upcast_unquantized",
        "lora",
        "global_batch_size",
    ),
    Touch.MEMORY: (
        "attention",
        "expandable_segments",
        "gradient_as_bucket_view",
        "reentrant_checkpointing",
        "gpus_per_node",
        "nodes",
        "world_size",
    ),
}
_RUN_SETTINGS: dict[Touch, tuple[str, ...]] = {
    Touch.NUMERICS: (
        "model",
        "train_data",
        "epochs",
        "max_steps",
        "learning_rate",
        "weight_decay",
        "warmup_ratio",
        "max_grad_norm",
        "lr_scheduler",
        "seed",
        "assistant_only_loss",
        "dpo",
        "labels",
        "new_tokens",
    ),
    Touch.NEITHER: (
        "eval_data",
        "libraries",
        "save_steps",
        "eval_steps",
        "logging_steps",
        "save_total_limit",
        "output_dir",
        "trust_remote_code",
        "nvme_path",
        "scheduler",
        "time_limit_hours",
        "partition",
        "account",
        "image",
        "volume",
        "accelerator",
    ),
}
_SAME_ALGORITHM = (
    frozenset({Optimizer.ADAMW.value, Optimizer.ADAMW_FOREACH.value, Optimizer.PAGED_ADAMW.value}),
    frozenset({Optimizer.ADAMW_8BIT.value, Optimizer.PAGED_ADAMW_8BIT.value}),
)
"""Optimizers that compute the same update and differ in temporaries or in where their states lie."""


def _touches() -> dict[str, Touch]:
    """Returns what each setting touches: what the ladder's techniques say of theirs, and the table of the others."""
    table: dict[str, Touch] = {}
    for technique in sorted(LADDER, key=lambda item: item.fidelity is Fidelity.NUMERICS):  # the stronger one last
        touch = Touch.NUMERICS if technique.fidelity is Fidelity.NUMERICS else Touch.MEMORY
        table |= dict.fromkeys(DIMENSION_SETTINGS[technique.dimension], touch)
    for touch, names in _OTHER_SETTINGS.items():
        table |= dict.fromkeys(names, touch)
    for touch, names in _RUN_SETTINGS.items():
        table |= {f"run.{name}": touch for name in names}
    return table


SETTING_TOUCH: dict[str, Touch] = _touches()
"""What a change of each setting touches, by its name in ``plan.settings`` (``run.`` before those of the script)."""


def touch_of(setting: str, before: Any, after: Any) -> Touch:
    """Returns what a change of one setting touches; `UNKNOWN` for a setting that this version of memc does not have.

    A global batch that stays the same makes micro-batch and accumulation a matter of memory; one that does not is a
    setting of its own. Rounding may differ in all of them: sums are taken in another order.

    Args:
        setting: Dotted name, for example ``lora.rank``.
        before, after: Its values.
    """
    if setting == "optimizer" and any({before, after} <= group for group in _SAME_ALGORITHM):
        return Touch.MEMORY
    if setting in SETTING_TOUCH:
        return SETTING_TOUCH[setting]
    return SETTING_TOUCH.get(setting.partition(".")[0], Touch.UNKNOWN)
