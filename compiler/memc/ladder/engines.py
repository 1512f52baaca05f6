"""A configuration under another engine, with what that engine brings with it."""

from __future__ import annotations

from dataclasses import replace

from memc.config import AdapterPrecision, Engine, FsdpConfig, Method, Precision, TrainingConfig, ZeroConfig


def under_deepspeed(config: TrainingConfig, zero: ZeroConfig) -> TrainingConfig:
    """Returns the configuration under DeepSpeed.

    Adapters take the engine's 16-bit type, the only one that its optimizer keeps masters for.
    """
    lora = replace(config.lora, precision=AdapterPrecision.BASE) if config.lora is not None else None
    return replace(config, engine=Engine.DEEPSPEED, zero=zero, fsdp=None, lora=lora)


def under_fsdp(config: TrainingConfig, fsdp: FsdpConfig) -> TrainingConfig:
    """Returns the configuration under FSDP.

    Under mixed precision accelerate turns trainable parameters to fp32 before it shards them, unless the base is 4-bit.

    Source: accelerate utils/fsdp_utils.py fsdp2_prepare_model.
    """
    lora = config.lora
    mixed = config.precision in (Precision.BF16, Precision.FP16)
    if lora is not None and mixed and config.method is Method.LORA:
        lora = replace(lora, precision=AdapterPrecision.FP32)
    return replace(config, engine=Engine.FSDP, fsdp=fsdp, zero=None, lora=lora)
