"""Who runs the step: settings of each engine from pins and facts, and pins that an engine would refuse or ignore."""

from __future__ import annotations

from dataclasses import replace

from memc.config import (
    Engine,
    FsdpConfig,
    Method,
    Offload,
    Optimizer,
    Precision,
    TrainingConfig,
    ZeroConfig,
)
from memc.errors import Diagnostic
from memc.facts import ModelFacts, load_fact
from memc.ladder.engines import under_deepspeed, under_fsdp
from memc.spec import LoadedSpec
from memc.spec_engines import FSDP_PINS, STATE_PINS
from memc.units import ceil_div

_EIGHT_BIT = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)
_OFFLOAD_PINS = ("offload_optimizer", "offload_param")
_OFFLOADS = (Offload.CPU, Offload.NVME)


def zero_settings(loaded: LoadedSpec, model: ModelFacts) -> ZeroConfig:
    """Returns DeepSpeed's settings at stage 0: buckets scaled to the model unless pinned.

    Source: transformers integrations/deepspeed.py resolves "auto" to hidden squared, 0.9 hidden squared, 10 hidden;
        deepspeed runtime/zero/offload_config.py. A buffer on the way to NVMe must hold the largest shard of a tensor.
    """
    pin, hidden = loaded.spec.pin, model.hidden_size

    def pick(value: int | None, other: int) -> int:
        return other if value is None else value

    tensors = [linear.weight_params for group in model.groups for linear in group.block.linears]
    largest = ceil_div(max([*tensors, model.embedding_params, model.head_params]), loaded.spec.world_size)
    return ZeroConfig(
        stage=0,
        reduce_bucket_elements=pick(pin.reduce_bucket_size, hidden * hidden),
        allgather_bucket_elements=pick(pin.allgather_bucket_size, _int_fact("deepspeed.allgather_bucket_elements")),
        prefetch_elements=pick(pin.prefetch_bucket_size, hidden * hidden * 9 // 10),
        persistence_elements=pick(pin.param_persistence_threshold, 10 * hidden),
        max_live_elements=pick(pin.max_live_parameters, _int_fact("deepspeed.max_live_elements")),
        sub_group_elements=pick(pin.sub_group_size, _int_fact("deepspeed.sub_group_elements")),
        overlap_comm=True if pin.overlap_comm is None else pin.overlap_comm,
        bf16_master_weights=bool(pin.bf16_master_weights or pin.bf16_optimizer_states),
        bf16_states=bool(pin.bf16_optimizer_states),
        partitioned_at_load=not model.checkpoint_quantization,
        nvme_buffer_elements=max(largest, _int_fact("deepspeed.nvme_buffer_elements")),
        nvme_buffers=_int_fact("deepspeed.nvme_buffers"),
        nvme_resident_elements=_int_fact("deepspeed.nvme_resident_elements"),
        nvme_state_buffers=_int_fact("deepspeed.nvme_state_buffers"),
        nvme_block_bytes=_int_fact("deepspeed.nvme_block_bytes"),
        nvme_queue_depth=_int_fact("deepspeed.nvme_queue_depth"),
        nvme_threads=_int_fact("deepspeed.nvme_threads"),
    )


def fsdp_settings(loaded: LoadedSpec) -> FsdpConfig:
    """Returns FSDP's settings: accelerate's defaults for version 2 unless pinned."""
    pin = loaded.spec.pin
    return FsdpConfig(
        version=pin.fsdp_version or 2,
        reshard_after_forward=True if pin.reshard_after_forward is None else pin.reshard_after_forward,
        hybrid=bool(pin.hybrid_sharding),
        reduce_each_micro_batch=True if pin.reduce_each_micro_batch is None else pin.reduce_each_micro_batch,
        sharded_checkpoints=True if pin.sharded_checkpoints is None else pin.sharded_checkpoints,
    )


def pinned_engine(loaded: LoadedSpec, config: TrainingConfig, zero: ZeroConfig, fsdp: FsdpConfig) -> TrainingConfig:
    """Returns the configuration with pinned engine, stage and offload."""
    pin = loaded.spec.pin
    if wants_fsdp(loaded):
        offloads = Offload.CPU in (pin.offload_param, pin.offload_optimizer)
        return under_fsdp(config, replace(fsdp, offload=Offload.CPU if offloads else Offload.NONE))
    if not wants_deepspeed(loaded):
        return config if pin.engine is None else replace(config, engine=pin.engine)
    optimizer, param = pin.offload_optimizer or Offload.NONE, pin.offload_param or Offload.NONE
    stage = pin.zero_stage
    if stage is None:
        needs_3 = param in _OFFLOADS or optimizer is Offload.NVME or pin.hybrid_sharding
        some = optimizer is Offload.CPU or zero.bf16_master_weights
        stage = 3 if needs_3 else 2 if some else 0
    hpz = config.gpus_per_node if pin.hybrid_sharding else 1
    return under_deepspeed(
        config, replace(zero, stage=stage, offload_optimizer=optimizer, offload_param=param, hpz_partition=hpz)
    )


def wants_fsdp(loaded: LoadedSpec) -> bool:
    """Whether a pin asks for FSDP, by name or by a setting that only FSDP has."""
    pin = loaded.spec.pin
    if pin.engine is not None:
        return pin.engine is Engine.FSDP
    named = any(getattr(pin, name) is not None for name in FSDP_PINS)
    shares = (pin.context_parallel or 1) > 1 or bool(pin.hybrid_sharding)
    return named or (shares and not _names_deepspeed(loaded))


def wants_deepspeed(loaded: LoadedSpec) -> bool:
    """Whether a pin asks for DeepSpeed, by name or by what only DeepSpeed does."""
    pin = loaded.spec.pin
    if pin.engine is not None:
        return pin.engine is Engine.DEEPSPEED
    offloads = any(where in _OFFLOADS for where in (pin.offload_param, pin.offload_optimizer))
    return not wants_fsdp(loaded) and (_names_deepspeed(loaded) or offloads)


def _names_deepspeed(loaded: LoadedSpec) -> bool:
    pin = loaded.spec.pin
    disk = Offload.NVME in (pin.offload_optimizer, pin.offload_param)
    return (pin.zero_stage or 0) > 0 or disk or any(getattr(pin, name) for name in STATE_PINS)


def engine_contradictions(loaded: LoadedSpec) -> list[Diagnostic]:
    """Returns pins that the engine would refuse, or accept and ignore."""
    return [*_deepspeed_contradictions(loaded), *_fsdp_contradictions(loaded), *_offload_contradictions(loaded)]


def _deepspeed_contradictions(loaded: LoadedSpec) -> list[Diagnostic]:
    spec, pin = loaded.spec, loaded.spec.pin
    found: list[Diagnostic] = []
    if not wants_deepspeed(loaded):
        return found
    if pin.optimizer in _EIGHT_BIT:
        offloads = pin.offload_optimizer in _OFFLOADS
        reason = (
            "offload_optimizer runs DeepSpeed's CPU Adam on fp32 states; 8bit states stay on the GPU"
            if offloads
            else "DeepSpeed keeps fp32 masters and states of its own beside 8bit ones"
        )
        hint = "remove pin.offload_optimizer, or pin.optimizer" if offloads else "remove pin.optimizer"
        message = f"{pin.optimizer} does not go with DeepSpeed: {reason}"
        found.append(loaded.diagnostic("pin.optimizer", "optimizer-under-deepspeed", message, hint))
    if pin.precision is Precision.BF16_PURE:
        message = "bf16_pure does not go with DeepSpeed, which keeps fp32 masters beside bf16 weights"
        hint = "pin precision to bf16 with bf16_master_weights and bf16_optimizer_states, or engine to single or ddp"
        found.append(loaded.diagnostic("pin.precision", "precision-under-deepspeed", message, hint))
    stage3 = pin.zero_stage == 3 or pin.offload_param in _OFFLOADS
    if stage3 and spec.methods == (Method.QLORA,):
        message = "ZeRO-3 does not partition a quantised base: every GPU would load the whole 4-bit model"
        field = "pin.zero_stage" if pin.zero_stage == 3 else "pin.offload_param"
        hint = "pin zero_stage to 2 or less, engine to fsdp, or use method lora, whose base ZeRO-3 partitions"
        found.append(loaded.diagnostic(field, "qlora-under-zero-3", message, hint))
    if pin.bf16_master_weights and not pin.bf16_optimizer_states and pin.offload_optimizer not in _OFFLOADS:
        message = "DeepSpeed takes bf16 master weights beside fp32 states only with the optimizer offloaded"
        hint = "add bf16_optimizer_states: true, or offload_optimizer: cpu"
        found.append(loaded.diagnostic("pin.bf16_master_weights", "bf16-masters-need-offload", message, hint))
    if pin.precision in (Precision.FP16, Precision.FP32) and any(getattr(pin, name) for name in STATE_PINS):
        field = next(f"pin.{name}" for name in STATE_PINS if getattr(pin, name))
        message = f"bf16 master weights need precision bf16, and precision is {pin.precision}"
        found.append(loaded.diagnostic(field, "bf16-masters-need-bf16", message, "pin precision to bf16"))
    return found


def _fsdp_contradictions(loaded: LoadedSpec) -> list[Diagnostic]:
    spec, pin = loaded.spec, loaded.spec.pin
    found: list[Diagnostic] = []
    if not wants_fsdp(loaded):
        return found
    if spec.world_size == 1:
        field = "pin.engine" if pin.engine is Engine.FSDP else "hardware.count"
        message = "FSDP over one GPU shards nothing"
        hint = "pin engine to single, or give more GPUs"
        found.append(loaded.diagnostic(field, "fsdp-over-one-rank", message, hint))
    offloads = next((name for name in _OFFLOAD_PINS if getattr(pin, name) is Offload.CPU), None)
    if offloads is not None and spec.methods == (Method.QLORA,):
        message = "4-bit weights lose their quantisation state when FSDP moves them off the GPU"
        hint = f"remove pin.{offloads}, or use method lora"
        found.append(loaded.diagnostic(f"pin.{offloads}", "qlora-under-fsdp-offload", message, hint))
    if pin.optimizer in (*_EIGHT_BIT, Optimizer.PAGED_ADAMW) and pin.fsdp_version != 1:
        message = f"{pin.optimizer} does not go with FSDP2: its kernels read plain tensors, FSDP2's shards are DTensors"
        hint = "remove pin.optimizer, or pin engine to ddp"
        found.append(loaded.diagnostic("pin.optimizer", "optimizer-under-fsdp", message, hint))
    return found


def _offload_contradictions(loaded: LoadedSpec) -> list[Diagnostic]:
    """Returns offloads to a place that the spec does not give."""
    spec, pin = loaded.spec, loaded.spec.pin
    found = []
    for name in _OFFLOAD_PINS:
        if getattr(pin, name) is Offload.NVME and spec.hardware.nvme is None:
            message = f"{name}: nvme needs hardware.nvme, the free space of one node, which is not given"
            hint = "add nvme: 1TB below hardware, and nvme_path when the drive is not at /local_nvme"
            found.append(loaded.diagnostic(f"pin.{name}", "nvme-space-unknown", message, hint))
    return found


def _int_fact(key: str) -> int:
    return int(load_fact(key).value)
