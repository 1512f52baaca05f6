"""Which data type each kind of tensor has under a configuration, in bytes per element."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import AdapterPrecision, BasePrecision, Engine, Method, Precision, TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Bytes per element, and whether autocast decides the type of matrix products.

    Attributes:
        weight: Weights of the base model that are not quantised, while a layer runs.
        compute: Inputs and outputs of matrix products.
        stream: The residual stream between layers.
        adapter: LoRA adapters, while a layer runs; equals `weight` without adapters.
        gradient: Gradients as autograd leaves them.
        autocast: Whether torch.autocast casts weights and inputs on the fly.
        masters: Whether the optimizer keeps fp32 copies beside 16-bit weights (DeepSpeed).
        state: One Adam moment, unquantised.
        stored: What trains, as the optimizer and its gradients hold it between uses; differs from `weight` (or
            `adapter`) only under FSDP, whose shards stay fp32 while the gathered copy is 16-bit.
    """

    weight: int
    compute: int
    stream: int
    adapter: int
    gradient: int
    autocast: bool
    masters: bool
    state: int
    stored: int


def dtypes(config: TrainingConfig) -> Dtypes:
    """Returns the element sizes that a configuration gives.

    Source: transformers Trainer and accelerate mixed precision (autocast over the loaded weights; FSDP's policy, before
        which what trains is upcast to fp32); DeepSpeed's bf16 and fp16 sections (weights cast at
        initialisation, fp32 masters in the optimizer); PEFT `autocast_adapter_dtype` and
        `prepare_model_for_kbit_training`. What a 4-bit base leaves unquantised stays at 16 bits unless that upcasts it.
    """
    full = config.method is Method.FULL
    if config.precision is Precision.FP32:
        return _all_fp32()
    if config.engine is Engine.DEEPSPEED:
        return _types(weight=2, stream=2, trained=2, state=4, masters=True)
    base = _base_bytes(config)
    adapter = 4 if config.lora is not None and config.lora.precision is AdapterPrecision.FP32 else 2
    if config.precision is Precision.BF16_PURE:
        trained = base if full else adapter
        return _types(weight=base, stream=base, trained=trained, state=trained)
    if config.engine is Engine.FSDP:
        return _types(weight=2, stream=2, trained=2, state=4, stored=4, autocast=True)
    trained = base if full else adapter
    return _types(weight=base, stream=base, trained=trained, state=trained, autocast=True)


def _base_bytes(config: TrainingConfig) -> int:
    """Returns bytes per element of loaded weights that are not quantised."""
    if config.method is Method.QLORA and config.upcast_unquantized:
        return 4
    if config.base_precision is BasePrecision.SCRIPT:
        return 4 if config.method is Method.FULL and config.precision is not Precision.BF16_PURE else 2
    return 4 if config.base_precision is BasePrecision.FP32 else 2


def _all_fp32() -> Dtypes:
    return Dtypes(
        weight=4, compute=4, stream=4, adapter=4, gradient=4, autocast=False, masters=False, state=4, stored=4
    )


def _types(
    *,
    weight: int,
    stream: int,
    trained: int,
    state: int,
    stored: int | None = None,
    autocast: bool = False,
    masters: bool = False,
) -> Dtypes:
    """Returns the types of 16-bit products; adapters and gradients have the type of what trains."""
    return Dtypes(
        weight=weight,
        compute=2,
        stream=stream,
        adapter=trained,
        gradient=trained,
        autocast=autocast,
        masters=masters,
        state=state,
        stored=trained if stored is None else stored,
    )
