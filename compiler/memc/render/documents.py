"""The documents that other programs read, as plain dicts: DeepSpeed, Accelerate, PEFT."""

from __future__ import annotations

from typing import Any

from memc.config import (
    AdapterPrecision,
    Engine,
    Method,
    Offload,
    Optimizer,
    Precision,
    Task,
    TrainingConfig,
    ZeroConfig,
)
from memc.facts import ModelFacts
from memc.facts.vocabulary import vocabulary_modules
from memc.plan import Plan
from memc.render.sharding import AMP_OF_PRECISION, fsdp_sections

DS_CONFIG = "ds_config.json"
ACCELERATE = "accelerate.yaml"
PEFT_CONFIG = "peft_config.json"

_DEEPSPEED_DTYPE = {
    Precision.BF16: "bf16",
    Precision.BF16_PURE: "bf16",
    Precision.FP16: "fp16",
    Precision.FP32: "fp32",
}


def ds_config(plan: Plan) -> dict[str, Any]:
    """Returns ds_config.json.

    The batch triple is literal, so the file is right on its own; what train.py owns (learning rate, clipping) is
    ``auto``, so it stands in one place only.

    Raises:
        ValueError: When the configuration has no ZeRO settings.
    """
    config = plan.config
    if config.zero is None:
        raise ValueError("a DeepSpeed file needs ZeRO settings")
    document: dict[str, Any] = {
        "train_batch_size": config.global_batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": "auto",
        "data_types": {"grad_accum_dtype": _DEEPSPEED_DTYPE[config.precision]},
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _zero_section(config.zero, plan.run.nvme_path) | _leaf_section(config.zero, plan.model),
    }
    document.update(_precision_sections(config, config.zero))
    if config.zero.offload_optimizer is not Offload.NONE:
        document["zero_force_ds_cpu_optimizer"] = True
    if Offload.NVME in (config.zero.offload_optimizer, config.zero.offload_param):
        document["aio"] = {
            "block_size": config.zero.nvme_block_bytes,
            "queue_depth": config.zero.nvme_queue_depth,
            "intra_op_parallelism": config.zero.nvme_threads,
            "single_submit": False,
            "overlap_events": True,
        }
    if config.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH):
        document["optimizer"] = _optimizer_section(config)
    return document


def _precision_sections(config: TrainingConfig, zero: ZeroConfig) -> dict[str, Any]:
    if config.precision is Precision.FP16:
        scaling = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
        return {"bf16": {"enabled": False}, "fp16": {"enabled": True, "min_loss_scale": 1, **scaling}}
    bf16: dict[str, Any] = {"enabled": config.precision is not Precision.FP32}
    if zero.bf16_master_weights:
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": zero.bf16_states}
    return {"bf16": bf16, "fp16": {"enabled": False}}


def _zero_section(zero: ZeroConfig, nvme_path: str) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": zero.stage}
    if zero.stage == 0:
        return section
    section |= {
        "reduce_bucket_size": zero.reduce_bucket_elements,
        "overlap_comm": zero.overlap_comm,
        "contiguous_gradients": True,
        "reduce_scatter": True,
    }
    if zero.stage < 3:
        section |= {"allgather_partitions": True, "allgather_bucket_size": zero.allgather_bucket_elements}
    else:
        section |= {
            "sub_group_size": zero.sub_group_elements,
            "stage3_prefetch_bucket_size": zero.prefetch_elements,
            "stage3_param_persistence_threshold": zero.persistence_elements,
            "stage3_max_live_parameters": zero.max_live_elements,
            "stage3_max_reuse_distance": zero.max_live_elements,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if zero.hpz_partition > 1:
        section["zero_hpz_partition_size"] = zero.hpz_partition
    if zero.offload_optimizer is not Offload.NONE:
        section["offload_optimizer"] = {"device": zero.offload_optimizer.value, "pin_memory": True}
    if zero.offload_optimizer is Offload.NVME:
        section["offload_optimizer"] |= {"nvme_path": nvme_path, "buffer_count": zero.nvme_state_buffers}
    if zero.offload_param is not Offload.NONE:
        section["offload_param"] = {"device": zero.offload_param.value, "pin_memory": True}
    if zero.offload_param is Offload.NVME:
        section["offload_param"] |= {
            "nvme_path": nvme_path,
            "buffer_count": zero.nvme_buffers,
            "buffer_size": zero.nvme_buffer_elements,
            "max_in_cpu": zero.nvme_resident_elements,
        }
    return section


def _leaf_section(zero: ZeroConfig, model: ModelFacts) -> dict[str, Any]:
    """Returns which modules ZeRO-3 gathers and reduces as a whole: those whose experts differ from rank to rank.

    Source: deepspeed runtime/zero/leaf_module_config.py, whose default names three families only.
    """
    routers = sorted({group.block.mlp.router_class for group in model.groups} - {""})
    return {"leaf_module": {"classes": routers}} if zero.stage == 3 and routers else {}


def _optimizer_section(config: TrainingConfig) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    if config.zero is not None and config.zero.offload_optimizer is Offload.NONE:
        # torch's AdamW needs no compiler on the training machine; DeepSpeed's own FusedAdam does.
        implementation = "fused" if config.optimizer is Optimizer.ADAMW else "foreach"
        params |= {"torch_adam": True, implementation: True}
    return {"type": "AdamW", "params": params}


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """Returns accelerate.yaml.

    Beside a DeepSpeed file, Accelerate refuses nine keys that would repeat it; none of them is written.
    """
    config = plan.config
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": config.nodes,
        "num_processes": config.world_size,
        "rdzv_backend": "static",
        "same_network": True,
    }
    if config.engine is Engine.DEEPSPEED:
        return document | {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_config_file": DS_CONFIG,
                "deepspeed_multinode_launcher": "standard",
                "zero3_init_flag": config.zero_stage == 3,
            },
        }
    if config.fsdp is not None:
        return document | fsdp_sections(config, plan.model, config.fsdp)
    return document | {
        "distributed_type": "MULTI_GPU" if config.engine is Engine.DDP else "NO",
        "mixed_precision": AMP_OF_PRECISION[config.precision],
        "use_cpu": False,
    }


def peft_config(plan: Plan) -> dict[str, Any]:
    """Returns peft_config.json: every field that shapes the adapters, none left to a library's default.

    Raises:
        ValueError: When the configuration has no adapter settings.
    """
    lora = plan.config.lora
    if lora is None:
        raise ValueError("an adapter file needs LoRA settings")
    return _vocabulary_keys(plan) | {
        "base_model_name_or_path": plan.run.model,
        "bias": "none",
        "exclude_modules": lora.excluded_modules or None,
        "inference_mode": False,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": list(lora.modules_to_save) or None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(lora.target_modules),
        "task_type": "SEQ_CLS" if plan.config.task is Task.CLASSIFICATION else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _vocabulary_keys(plan: Plan) -> dict[str, Any]:
    """Returns what trains of embedding and head beside the adapters; train.py fills in the numbers of new tokens.

    Source: peft 0.21.2 tuners/lora/config.py (`trainable_token_indices`, `ensure_weight_tying`).
    """
    lora, model = plan.config.lora, plan.model
    assert lora is not None
    if lora.new_tokens:
        names = vocabulary_modules(model.model_type)
        return {"trainable_token_indices": {names.embedding: []} | ({} if model.tied else {names.head: []})}
    return {"ensure_weight_tying": True} if model.tied and (lora.trains_embedding or lora.trains_head) else {}


def needs_reentrant_checkpointing(config: TrainingConfig) -> bool:
    """Returns whether activation checkpointing must be the reentrant kind.

    Under ZeRO-3 frozen weights are partitioned again before the recomputation, which the non-reentrant kind takes for
    a changed graph; TRL forces the reentrant kind there, so it is written down instead of being overruled.
    """
    return config.zero_stage == 3 and config.method is not Method.FULL


def adapter_dtype(config: TrainingConfig) -> str:
    """Returns the torch dtype name of the adapters.

    DeepSpeed keeps every parameter of its engine in one 16-bit type and the fp32 copies in its optimizer, so there the
    adapters follow the engine.
    """
    base = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[_DEEPSPEED_DTYPE[config.precision]]
    follows_base = config.engine is Engine.DEEPSPEED or (
        config.lora is not None and config.lora.precision is AdapterPrecision.BASE
    )
    return base if follows_base else "float32"


def weights_dtype(config: TrainingConfig) -> str:
    """Returns the torch dtype name that the base model is loaded in (for a 4-bit base: that of its other tensors)."""
    base = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[_DEEPSPEED_DTYPE[config.precision]]
    master_in_model = config.method is Method.FULL and config.engine is not Engine.DEEPSPEED
    if master_in_model and config.precision in (Precision.BF16, Precision.FP16):
        return "float32"
    return base
