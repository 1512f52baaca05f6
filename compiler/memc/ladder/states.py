"""Techniques that change which parameters train and what the optimizer keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memc.config import AdapterPrecision, Engine, Method, Optimizer, Precision, Reference, Task, TrainingConfig
from memc.ladder.technique import Dimension, Fidelity, Situation, Technique
from memc.ledger.entries import Account

EIGHT_BIT = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)
BITSANDBYTES = (*EIGHT_BIT, Optimizer.PAGED_ADAMW)
# A frozen base is kept in 16 or 4 bits and saves less for backward; adapters add what is theirs.
_WITH_ADAPTERS = (Account.PARAMETERS, Account.MASTER_WEIGHTS, Account.ACTIVATIONS)
_STALLS = "Updates below 1/256 of a weight round away: small learning rates stall."


def _states(optimizer: Optimizer) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, _situation: Situation) -> TrainingConfig:
        return replace(config, optimizer=optimizer)

    return apply


def _states_why_not(config: TrainingConfig, situation: Situation) -> str | None:
    if config.optimizer in BITSANDBYTES:
        return "the optimizer is one of bitsandbytes already"
    if config.engine is Engine.DEEPSPEED:
        return "DeepSpeed runs its own AdamW with fp32 states"
    if config.engine is Engine.FSDP:
        return "bitsandbytes optimizers read plain tensors, FSDP2's shards are DTensors"
    if not situation.gpu.bitsandbytes:
        return f"bitsandbytes has no kernels for {situation.gpu.name}"
    if config.precision is Precision.BF16_PURE:
        return "states are bf16 already"
    return None


def _paged_why_not(config: TrainingConfig, situation: Situation) -> str | None:
    if situation.host_bytes is None:
        return "hardware.host_memory is not given"
    return _states_why_not(config, situation)


def _pure(config: TrainingConfig, _situation: Situation) -> TrainingConfig:
    return replace(config, precision=Precision.BF16_PURE)


def _pure_why_not(config: TrainingConfig, _situation: Situation) -> str | None:
    if config.precision is not Precision.BF16:
        return "the card or the spec does not use bf16"
    if config.engine is Engine.DEEPSPEED:
        return "DeepSpeed runs its own AdamW with fp32 states"
    if config.method is not Method.FULL:
        return "adapters are too small for their states to matter"
    return None


def _with_method(method: Method) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, situation: Situation) -> TrainingConfig:
        off = Reference.ADAPTERS_OFF if config.task is Task.DPO else config.reference
        return replace(config, method=method, lora=situation.lora, reference=off)

    return apply


def _method_why_not(method: Method) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, situation: Situation) -> str | None:
        if method not in situation.methods:
            return f"the spec does not allow method {method}"
        if config.method is method:
            return f"the method is {method} already"
        if method is Method.QLORA and not situation.gpu.bitsandbytes:
            return f"bitsandbytes has no kernels for {situation.gpu.name}"
        if method is Method.QLORA and config.zero is not None and config.zero.stage == 3:
            return "a 4-bit base is not partitioned by ZeRO-3"
        return None

    return why_not


def _adapters_why_not(config: TrainingConfig, _situation: Situation) -> str | None:
    if config.lora is None:
        return "there are no adapters"
    if config.engine is Engine.DEEPSPEED:
        return "under DeepSpeed adapters take the 16-bit type of the engine already"
    if config.engine is Engine.FSDP and config.method is Method.LORA and config.precision is not Precision.BF16_PURE:
        return "accelerate turns trainable parameters to fp32 before FSDP shards them"
    if config.lora.precision is AdapterPrecision.BASE:
        return "adapters have the type of the base already"
    if config.precision is Precision.FP16:
        return "fp16 gradients of fp16 adapters cannot be unscaled"
    if config.precision is Precision.FP32:
        return "the base is fp32 too"
    return None


def _adapters_in_base_precision(config: TrainingConfig, _situation: Situation) -> TrainingConfig:
    assert config.lora is not None
    return replace(config, lora=replace(config.lora, precision=AdapterPrecision.BASE))


def _optimizer(name: str, optimizer: Optimizer, fidelity: Fidelity, needs: str, boundary: str) -> Technique:
    return Technique(
        name=name,
        rung=6,
        dimension=Dimension.STATES,
        accounts=(Account.OPTIMIZER_STATES,),
        fidelity=fidelity,
        needs=needs,
        boundary=boundary,
        why_not=_states_why_not,
        apply=_states(optimizer),
    )


# All states wait in host memory and cross PCIe in every step: that is offload, and costs what offload costs.
PAGED = Technique(
    name="paged-adamw",
    rung=8,
    dimension=Dimension.STATES,
    accounts=(Account.OPTIMIZER_STATES,),
    fidelity=Fidelity.MEMORY,
    needs="bitsandbytes, managed memory, host memory",
    boundary="Full 32-bit states page over PCIe in every step.",
    why_not=_paged_why_not,
    apply=_states(Optimizer.PAGED_ADAMW),
)
OPTIMIZERS: tuple[Technique, ...] = (
    _optimizer(
        "adamw-8bit",
        Optimizer.ADAMW_8BIT,
        Fidelity.NUMERICS,
        "bitsandbytes",
        "Embeddings and small tensors keep 32-bit states; gains nothing beside small adapters.",
    ),
    _optimizer(
        "paged-adamw-8bit",
        Optimizer.PAGED_ADAMW_8BIT,
        Fidelity.NUMERICS,
        "bitsandbytes, managed memory",
        "States page over PCIe once they no longer fit beside the rest.",
    ),
)
_PURE_ACCOUNTS = (Account.PARAMETERS, Account.GRADIENTS, Account.OPTIMIZER_STATES, Account.ACTIVATIONS)
PURE: tuple[Technique, ...] = (
    Technique(
        name="bf16-states",
        rung=6,
        dimension=Dimension.STATES,
        accounts=_PURE_ACCOUNTS,
        fidelity=Fidelity.NUMERICS,
        needs="bf16",
        boundary=_STALLS,
        why_not=_pure_why_not,
        apply=_pure,
    ),
    Technique(
        name="bf16-adamw-8bit",
        rung=6,
        dimension=Dimension.STATES,
        accounts=_PURE_ACCOUNTS,
        fidelity=Fidelity.NUMERICS,
        needs="bf16, bitsandbytes",
        boundary=_STALLS,
        why_not=lambda config, situation: _pure_why_not(config, situation) or _states_why_not(config, situation),
        apply=lambda config, situation: _pure(_states(Optimizer.ADAMW_8BIT)(config, situation), situation),
    ),
)
ADAPTERS = Technique(
    name="adapters-in-base-precision",
    rung=6,
    dimension=Dimension.ADAPTERS,
    accounts=(Account.ACTIVATIONS, Account.PARAMETERS, Account.GRADIENTS, Account.OPTIMIZER_STATES),
    fidelity=Fidelity.NUMERICS,
    needs="adapters, bf16",
    boundary="Saves a copy of every adapter's input; " + _STALLS[0].lower() + _STALLS[1:],
    why_not=_adapters_why_not,
    apply=_adapters_in_base_precision,
)
METHODS: tuple[Technique, ...] = (
    Technique(
        name="lora",
        rung=7,
        dimension=Dimension.METHOD,
        accounts=(Account.GRADIENTS, Account.OPTIMIZER_STATES, *_WITH_ADAPTERS),
        fidelity=Fidelity.NUMERICS,
        needs="peft, a spec that allows it",
        boundary="Does not cut activations; low rank may not learn a new ability.",
        why_not=_method_why_not(Method.LORA),
        apply=_with_method(Method.LORA),
    ),
    Technique(
        name="qlora",
        rung=7,
        dimension=Dimension.METHOD,
        accounts=(*_WITH_ADAPTERS, Account.GRADIENTS, Account.OPTIMIZER_STATES),
        fidelity=Fidelity.NUMERICS,
        needs="peft, bitsandbytes, a spec that allows it",
        boundary="Dequantises every weight in every pass; embeddings and head stay at 16 bits.",
        why_not=_method_why_not(Method.QLORA),
        apply=_with_method(Method.QLORA),
    ),
)
