"""What train.py is written from: its constants and the branches of its text."""

from __future__ import annotations

from typing import Any

from memc.config import (
    Attention,
    Engine,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Reference,
    Task,
    TrainingConfig,
)
from memc.facts.architectures import load_architecture
from memc.facts.classifiers import classifier_head
from memc.facts.records import Objective
from memc.ledger.image_shapes import image_stack, image_tokens
from memc.plan import Plan
from memc.render.documents import adapter_dtype, needs_reentrant_checkpointing, weights_dtype
from memc.render.releases import argument_branches
from memc.render.sharding import checkpoints_in_plugin

_MIXED_PRECISION = {
    Precision.BF16: "bf16",
    Precision.FP16: "fp16",
    Precision.FP32: "no",
    Precision.BF16_PURE: "no",
}
_PREFERENCE_ROW_KEYS = ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs")
_IMAGE_ROW_KEYS = ("messages", "prompt", "completion", "text", "images", "image")
_SFT_ROW_KEYS = ("messages", "prompt", "completion", "text", "tools", "chat_template_kwargs")


def constants(plan: Plan) -> dict[str, Any]:
    """Returns the named constants at the top of train.py, as plain literals."""
    config, run = plan.config, plan.run
    named: dict[str, Any] = {
        "MODEL": run.model,
        "TRUST_REMOTE_CODE": run.trust_remote_code,
        "TRAIN_FILE": run.train_data,
        "EVAL_FILE": run.eval_data,
        "OUTPUT_DIR": run.output_dir,
        "MAX_LENGTH": config.max_length,
        "PACKING": config.packing,
        "MICRO_BATCH_SIZE": config.micro_batch_size,
        "GRADIENT_ACCUMULATION_STEPS": config.gradient_accumulation_steps,
        "WORLD_SIZE": config.world_size,
        "EVAL_BATCH_SIZE": config.eval_batch_size or config.micro_batch_size,
        "PADDED_BATCHES": config.padding_mask,
        "EVALUATES": config.eval_batch_size > 0,
        "WEIGHTS_DTYPE": weights_dtype(config),
        "MIXED_PRECISION": mixed_precision(config),
        "ATTENTION": config.attention.value,
        "OPTIMIZER": config.optimizer.value,
        "CHECKPOINT_EVERY": config.checkpoint_every,
        "EPOCHS": run.epochs,
        "MAX_STEPS": run.max_steps or -1,
        "LEARNING_RATE": run.learning_rate,
        "LR_SCHEDULER": run.lr_scheduler,
        "WARMUP": run.warmup_ratio,
        "WEIGHT_DECAY": run.weight_decay,
        "MAX_GRAD_NORM": run.max_grad_norm,
        "SEED": run.seed,
        "LOGGING_STEPS": run.logging_steps or 1,
        "SAVE_STEPS": run.save_steps,
        "EVAL_STEPS": run.eval_steps,
        "SAVE_TOTAL_LIMIT": run.save_total_limit or None,
        "ROW_KEYS": ("text",),
    }
    if config.task is Task.SFT:
        named |= {"ROW_KEYS": _SFT_ROW_KEYS, "ASSISTANT_ONLY_LOSS": run.assistant_only_loss}
    if sees_images(plan):
        named |= {"ROW_KEYS": _IMAGE_ROW_KEYS} | _image_constants(plan)
    if config.task is Task.CLASSIFICATION:
        head = classifier_head(plan.model.model_type)
        named |= {
            "ROW_KEYS": ("text", "label"),
            "LABELS": run.labels or None,
            "HEAD_MODULES": head.trained,
            "UNUSED_MODULES": head.unused,
        }
    if run.dpo is not None:
        named |= {
            "ROW_KEYS": _PREFERENCE_ROW_KEYS,
            "BETA": run.dpo.beta,
            "PREFERENCE_LOSS": run.dpo.loss,
            "LABEL_SMOOTHING": run.dpo.label_smoothing,
            "PRECOMPUTE_REFERENCE": config.reference is Reference.PRECOMPUTED,
        }
    if run.new_tokens and config.lora is not None:
        named["NEW_TOKENS"] = run.new_tokens
    if config.lora is not None:
        named["ADAPTER_DTYPE"] = adapter_dtype(config)
    if config.checkpoint_offload:
        named["CHECKPOINT_OFFLOAD"] = True
    if config.context_parallel > 1:
        named["CONTEXT_PARALLEL"] = config.context_parallel
    return named


def sees_images(plan: Plan) -> bool:
    """Returns whether the samples of a plan hold images beside text."""
    return plan.model.objective is Objective.IMAGE_TEXT_LM and plan.config.images_per_sample > 0


def _image_constants(plan: Plan) -> dict[str, Any]:
    """Returns the bounds of images that the ledger counts with: how many, how large, how many tokens."""
    config, stack = plan.config, image_stack(plan.model)
    assert stack is not None
    named: dict[str, Any] = {
        "IMAGES_PER_SAMPLE": config.images_per_sample,
        "IMAGE_TOKENS": image_tokens(plan.model, config),
    }
    if stack.patches is not None:
        named |= {
            "MAX_PIXELS": config.image_pixels,
            "IMAGE_GRID": config.patch_grid(stack.patches.side, stack.patches.merge),
            "PATCH_ELEMENTS": stack.input_elements,
        }
    return named


def _image_branches(plan: Plan) -> dict[str, Any]:
    """Returns what the text of train.py branches on where samples hold images.

    A process whose batch has no image takes no part in what the others gather and reduce for the tower.
    """
    config, stack, lora = plan.config, image_stack(plan.model), plan.config.lora
    images = sees_images(plan)
    tower_trains = images and (lora is None or not lora.skipped_stacks)
    gathers = config.engine is Engine.FSDP or config.zero_stage == 3
    return {
        "images": images,
        "any_size": images and stack is not None and stack.patches is not None,
        "fixed_settings": load_architecture(plan.model.model_type).get("processor", {}) if images else {},
        "skipped": tuple(name.rpartition(".")[2] for name in lora.skipped_stacks) if lora is not None else (),
        "every_row_sees": images and (gathers or (config.zero_stage > 0 and tower_trains)),
        "finds_unused": tower_trains and config.engine is Engine.DDP,
    }


def mixed_precision(config: TrainingConfig) -> str:
    """Returns what TrainingArguments switch on: ``bf16``, ``fp16`` or ``no``.

    Under DeepSpeed the engine computes in its 16-bit type whatever the kind of bf16, and the two must agree.
    """
    if config.engine is Engine.DEEPSPEED and config.precision is Precision.BF16_PURE:
        return "bf16"
    return _MIXED_PRECISION[config.precision]


def branches(plan: Plan) -> dict[str, Any]:
    """Returns the names that the text of train.py branches on, and what is written inside its functions."""
    config = plan.config
    sft, pretrain = config.task is Task.SFT, config.task is Task.PRETRAIN
    chunked = config.loss is LossHead.CHUNKED
    return {
        "sft": sft,
        "pretrain": pretrain,
        "dpo": config.task is Task.DPO,
        "classification": config.task is Task.CLASSIFICATION,
        "auto_class": plan.model.auto_class,
        "dequantized": plan.model.checkpoint_quantization,
        "task": config.task.value,
        "method": config.method.value,
        "states_kept_by": _states_kept_by(config),
        "reference_model": config.reference is Reference.MODEL,
        "adapters": config.lora is not None,
        "new_tokens": bool(plan.run.new_tokens) and config.lora is not None,
        "quantized": config.method is Method.QLORA,
        "deepspeed": config.engine is Engine.DEEPSPEED,
        "ddp": config.engine is Engine.DDP,
        "fsdp": config.engine is Engine.FSDP,
        "reduces_each_micro_batch": config.fsdp is not None and config.fsdp.reduce_each_micro_batch,
        "plugin_checkpoints": checkpoints_in_plugin(config),
        "checkpoint_offload": config.checkpoint_offload,
        "nvme": Offload.NVME in (config.offload_optimizer, config.offload_param),
        "fsdp_offload": config.fsdp is not None and config.fsdp.offload is not Offload.NONE,
        "context_parallel": config.context_parallel > 1,
        "zero3": config.zero_stage == 3,
        "host_memory": config.checkpoint_offload
        or (config.fsdp is not None and config.method is Method.QLORA)
        or (config.offload_optimizer, config.offload_param) != (Offload.NONE, Offload.NONE),
        "HOST_MEMORY_BYTES": plan.ledger.host.required_bytes,
        "SHARD_RANKS": config.shard_ranks,
        **_image_branches(plan),
        **argument_branches(plan.run),
        "fp16": config.precision is Precision.FP16,
        "varlen": config.attention is Attention.FLASH_ATTENTION_2,
        "chunked_loss": pretrain and chunked,
        "plain_loss": sft and not chunked,
        "trainer_class": _trainer_class(config),
        "trainer_base": _TRAINER[config.task],
        "arguments_class": _ARGUMENTS[config.task],
        "use_reentrant": needs_reentrant_checkpointing(config),
        "DOUBLE_QUANTIZATION": config.double_quantization,
        "GRADIENT_AS_BUCKET_VIEW": config.gradient_as_bucket_view,
        "summary": _summary(config),
    }


def _states_kept_by(config: TrainingConfig) -> str:
    """Returns whose form the states in a checkpoint have, which no other can read."""
    if config.engine is Engine.DEEPSPEED:
        return f"DeepSpeed ZeRO-{config.zero_stage}"
    return "FSDP2" if config.engine is Engine.FSDP else "torch"


_TRAINER = {Task.SFT: "SFTTrainer", Task.PRETRAIN: "Trainer", Task.DPO: "DPOTrainer", Task.CLASSIFICATION: "Trainer"}
_ARGUMENTS = {
    Task.SFT: "SFTConfig",
    Task.PRETRAIN: "TrainingArguments",
    Task.DPO: "DPOConfig",
    Task.CLASSIFICATION: "TrainingArguments",
}
_SUMMARY = {
    Task.SFT: "Supervised fine-tuning of a causal language model",
    Task.PRETRAIN: "Continued pre-training of a causal language model",
    Task.DPO: "Preference training (DPO) of a causal language model",
    Task.CLASSIFICATION: "Training of a model that sorts texts into classes",
}


def _trainer_class(config: TrainingConfig) -> str:
    chunked = config.loss is LossHead.CHUNKED
    if config.task is Task.DPO:
        return "PreferenceTrainer"
    if config.task is Task.SFT:
        return "SFTTrainer" if chunked else "PlainLossTrainer"
    return "ChunkedLossTrainer" if chunked else "Trainer"


def _summary(config: TrainingConfig) -> str:
    """Returns the first line of the script; made of fixed words only."""
    method = {Method.FULL: "all weights", Method.LORA: "LoRA adapters", Method.QLORA: "LoRA adapters on a 4-bit base"}
    engine = {
        Engine.SINGLE: "one process",
        Engine.DDP: "data parallel",
        Engine.DEEPSPEED: f"DeepSpeed ZeRO-{config.zero_stage}",
        Engine.FSDP: "FSDP2",
    }
    return f"{_SUMMARY[config.task]}: {method[config.method]}, {engine[config.engine]}."


def requirement_branches(plan: Plan) -> dict[str, bool]:
    """Returns which libraries the folder needs beyond the ones every run needs."""
    config = plan.config
    trl = config.task in (Task.SFT, Task.DPO)
    return {
        "images": sees_images(plan),
        "trl": trl or config.loss is LossHead.CHUNKED,
        "adapters": config.lora is not None,
        "bitsandbytes": config.method is Method.QLORA
        or config.optimizer in (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT, Optimizer.PAGED_ADAMW),
        "deepspeed": config.engine is Engine.DEEPSPEED,
        "compiler": config.zero is not None and config.zero.offload_optimizer is not Offload.NONE,
        "nvme": Offload.NVME in (config.offload_optimizer, config.offload_param),
        "flash_attention": config.attention is Attention.FLASH_ATTENTION_2,
    }


def launcher_branches(config: TrainingConfig) -> dict[str, Any]:
    """Returns what launch.sh is written from."""
    return {
        "deepspeed": config.engine is Engine.DEEPSPEED,
        "single": config.engine is Engine.SINGLE,
        "expandable_segments": config.expandable_segments,
        "optimizer_on_host": config.offload_optimizer is not Offload.NONE,
        "multi_node": config.nodes > 1,
        "nodes": config.nodes,
        "last_node": config.nodes - 1,
        "processes_per_node": config.gpus_per_node,
    }
