"""Which data type each kind of tensor has under a configuration, in bytes per element."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import AdapterPrecision, Engine, Method, Precision, TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """Bytes per element, and whether autocast decides the type of matrix products.

    Attributes:
        weight: Weights of the base model that are not quantised.
        compute: Inputs and outputs of matrix products.
        stream: The residual stream between layers.
        adapter: LoRA adapters; equals `weight` without adapters.
        gradient: Gradients as autograd leaves them.
        autocast: Whether torch.autocast casts weights and inputs on the fly.
        masters: Whether the optimizer keeps fp32 copies beside 16-bit weights (DeepSpeed).
        state: One Adam moment, unquantised.
    """

    weight: int
    compute: int
    stream: int
    adapter: int
    gradient: int
    autocast: bool
    masters: bool
    state: int


def dtypes(config: TrainingConfig) -> Dtypes:
    """Returns the element sizes that the emitted script gives this configuration.

    Source: transformers Trainer and accelerate mixed precision (autocast over the loaded weights); DeepSpeed's bf16
        and fp16 sections (weights cast at initialisation, fp32 masters in the optimizer); PEFT
        `autocast_adapter_dtype`. What a 4-bit base leaves unquantised stays at 16 bits.
    """
    full = config.method is Method.FULL
    if config.precision is Precision.FP32:
        return Dtypes(weight=4, compute=4, stream=4, adapter=4, gradient=4, autocast=False, masters=False, state=4)
    if config.engine is Engine.DEEPSPEED:
        return Dtypes(weight=2, compute=2, stream=2, adapter=2, gradient=2, autocast=False, masters=True, state=4)
    if config.precision is Precision.BF16_PURE:
        fp32_adapters = config.lora is not None and config.lora.precision is AdapterPrecision.FP32
        adapter = 4 if fp32_adapters else 2
        stream = 4 if config.method is Method.QLORA else 2
        size = adapter if not full else 2
        return Dtypes(
            weight=2,
            compute=2,
            stream=stream,
            adapter=adapter,
            gradient=size,
            autocast=False,
            masters=False,
            state=size,
        )
    if full:
        return Dtypes(weight=4, compute=2, stream=4, adapter=4, gradient=4, autocast=True, masters=False, state=4)
    assert config.lora is not None
    adapter = 4 if config.lora.precision is AdapterPrecision.FP32 else 2
    return Dtypes(
        weight=2, compute=2, stream=2, adapter=adapter, gradient=adapter, autocast=True, masters=False, state=adapter
    )
