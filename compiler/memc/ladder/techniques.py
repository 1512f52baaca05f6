"""The techniques, and LADDER: the one place that orders them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memc.config import (
    AdapterPrecision,
    Engine,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    TrainingConfig,
)
from memc.ladder.technique import Dimension, Fidelity, Situation, Technique
from memc.ledger.entries import Account

# A frozen base is kept in 16 or 4 bits and saves less for backward; adapters add what is theirs.
_WITH_ADAPTERS = (Account.PARAMETERS, Account.MASTER_WEIGHTS, Account.ACTIVATIONS)
_EIGHT_BIT = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)


def _loss_why_not(config: TrainingConfig, _situation: Situation) -> str | None:
    return "the loss is chunked already" if config.loss is LossHead.CHUNKED else None


def _smaller_micro_batch(divisor: int) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, _situation: Situation) -> TrainingConfig:
        return with_micro_batch(config, config.micro_batch_size // divisor)

    return apply


def with_micro_batch(config: TrainingConfig, size: int) -> TrainingConfig:
    """Returns the configuration with another micro-batch and the same samples per step.

    `size` must divide micro-batch x accumulation. Evaluation follows the micro-batch; a batch of one needs no mask.
    """
    per_rank = config.micro_batch_size * config.gradient_accumulation_steps
    evaluation = min(size, config.eval_batch_size)
    return replace(
        config,
        micro_batch_size=size,
        gradient_accumulation_steps=per_rank // size,
        eval_batch_size=evaluation,
        padding_mask=config.padding_mask and size > 1,
    )


def _accumulation_why_not(divisor: int) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, _situation: Situation) -> str | None:
        if config.micro_batch_size % divisor:
            return f"a micro-batch of {config.micro_batch_size} does not divide by {divisor}"
        return None

    return why_not


def _checkpoint(every: int) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, _situation: Situation) -> TrainingConfig:
        return replace(config, checkpoint_every=every)

    return apply


def _checkpoint_why_not(every: int) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(_config: TrainingConfig, situation: Situation) -> str | None:
        layers = situation.model.num_layers
        return f"the model has only {layers} layers" if layers < every else None

    return why_not


def _zero(stage: int) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, situation: Situation) -> TrainingConfig:
        lora = config.lora
        if lora is not None:
            lora = replace(lora, precision=AdapterPrecision.BASE)
        return replace(config, engine=Engine.DEEPSPEED, zero=replace(situation.zero, stage=stage), lora=lora)

    return apply


def _zero_why_not(stage: int) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, _situation: Situation) -> str | None:
        if config.world_size == 1:
            return "over one rank ZeRO divides nothing"
        if config.optimizer in _EIGHT_BIT or config.precision is Precision.BF16_PURE:
            return "DeepSpeed keeps its own fp32 states; 8-bit and bf16 states are another rung"
        if stage == 3 and config.method is Method.QLORA:
            return "a 4-bit base is not partitioned at load: every GPU would first hold the whole base"
        if config.precision is Precision.FP32:
            return "the run is pinned to fp32"
        return None

    return why_not


def _states(optimizer: Optimizer) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, _situation: Situation) -> TrainingConfig:
        return replace(config, optimizer=optimizer)

    return apply


def _states_why_not(config: TrainingConfig, situation: Situation) -> str | None:
    if config.optimizer in _EIGHT_BIT:
        return "the optimizer keeps 8-bit states already"
    if config.engine is Engine.DEEPSPEED:
        return "DeepSpeed runs its own AdamW with fp32 states"
    if situation.gpu.vendor != "nvidia":
        return "bitsandbytes optimizers need an NVIDIA GPU"
    if config.precision is Precision.BF16_PURE:
        return "states are bf16 already"
    return None


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


def _lora(config: TrainingConfig, situation: Situation) -> TrainingConfig:
    return replace(config, method=Method.LORA, lora=situation.lora)


def _qlora(config: TrainingConfig, situation: Situation) -> TrainingConfig:
    return replace(config, method=Method.QLORA, lora=situation.lora)


def _method_why_not(method: Method) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, situation: Situation) -> str | None:
        if method not in situation.methods:
            return f"the spec does not allow method {method}"
        if config.method is method:
            return f"the method is {method} already"
        if method is Method.QLORA and situation.gpu.vendor != "nvidia":
            return "bitsandbytes 4-bit needs an NVIDIA GPU"
        if method is Method.QLORA and config.zero is not None and config.zero.stage == 3:
            return "a 4-bit base is not partitioned by ZeRO-3"
        return None

    return why_not


def _offload_optimizer(config: TrainingConfig, situation: Situation) -> TrainingConfig:
    zero = config.zero if config.zero is not None else replace(situation.zero, stage=2)
    lora = replace(config.lora, precision=AdapterPrecision.BASE) if config.lora is not None else None
    return replace(config, engine=Engine.DEEPSPEED, zero=replace(zero, offload_optimizer=Offload.CPU), lora=lora)


def _offload_optimizer_why_not(config: TrainingConfig, situation: Situation) -> str | None:
    if situation.host_bytes is None:
        return "hardware.host_memory is not given"
    if config.optimizer in _EIGHT_BIT or config.precision is Precision.BF16_PURE:
        return "DeepSpeed's CPU Adam keeps fp32 states; 8-bit and bf16 states stay on the GPU"
    if config.precision is Precision.FP32:
        return "the run is pinned to fp32"
    if config.zero is not None and config.zero.stage < 2:
        return "offload needs ZeRO stage 2 or 3"
    return None


def _offload_param(config: TrainingConfig, situation: Situation) -> TrainingConfig:
    zero = config.zero if config.zero is not None else situation.zero
    return replace(config, engine=Engine.DEEPSPEED, zero=replace(zero, stage=3, offload_param=Offload.CPU))


def _offload_param_why_not(config: TrainingConfig, situation: Situation) -> str | None:
    if situation.host_bytes is None:
        return "hardware.host_memory is not given"
    zero = config.zero
    if zero is None or zero.offload_optimizer is Offload.NONE:
        return "parameters are offloaded only after the optimizer"
    if config.world_size > 1 and zero.stage != 3:
        return "offloading parameters needs ZeRO stage 3"
    if config.method is Method.QLORA:
        return "a 4-bit base is not partitioned by ZeRO-3"
    return None


def _accumulation(divisor: int) -> Technique:
    return Technique(
        name=f"accumulate-{divisor}x",
        rung=3,
        dimension=Dimension.MICRO_BATCH,
        accounts=(Account.ACTIVATIONS, Account.GRADIENTS),
        fidelity=Fidelity.MEMORY,
        needs=f"a micro-batch that divides by {divisor}",
        boundary="A micro-batch of 1 is the end; very small ones leave the card waiting for launches.",
        why_not=_accumulation_why_not(divisor),
        apply=_smaller_micro_batch(divisor),
    )


def _checkpointing(every: int) -> Technique:
    return Technique(
        name="checkpoint-every-layer" if every == 1 else f"checkpoint-every-{every}-layers",
        rung=4,
        dimension=Dimension.CHECKPOINTING,
        accounts=(Account.ACTIVATIONS, Account.PARAMETERS),
        fidelity=Fidelity.MEMORY,
        needs="a model whose layers support it",
        boundary="Repeats up to one forward pass; pays little where weights and states are the wall.",
        why_not=_checkpoint_why_not(every),
        apply=_checkpoint(every),
    )


def _sharding(stage: int, rung: int, accounts: tuple[Account, ...], boundary: str) -> Technique:
    return Technique(
        name=f"zero-{stage}",
        rung=rung,
        dimension=Dimension.SHARDING,
        accounts=accounts,
        fidelity=Fidelity.MEMORY,
        needs="more than one GPU, DeepSpeed",
        boundary=boundary,
        why_not=_zero_why_not(stage),
        apply=_zero(stage),
    )


LADDER: tuple[Technique, ...] = (
    Technique(
        name="chunked-loss",
        rung=2,
        dimension=Dimension.LOSS,
        accounts=(Account.ACTIVATIONS, Account.GRADIENTS, Account.PARAMETERS),
        fidelity=Fidelity.MEMORY,
        needs="a causal language model head",
        boundary="Saves nothing once logits are small beside the layers.",
        why_not=_loss_why_not,
        apply=lambda config, _: replace(config, loss=LossHead.CHUNKED),
    ),
    *(_accumulation(divisor) for divisor in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
    *(_checkpointing(every) for every in (4, 3, 2, 1)),
    _sharding(
        1,
        5,
        (Account.OPTIMIZER_STATES, Account.MASTER_WEIGHTS, Account.GRADIENTS),
        "Weights stay whole on every GPU, gradients until the step.",
    ),
    _sharding(
        2,
        5,
        (Account.OPTIMIZER_STATES, Account.MASTER_WEIGHTS, Account.GRADIENTS),
        "Weights stay whole on every GPU; every micro-batch reduces.",
    ),
    Technique(
        name="adamw-8bit",
        rung=6,
        dimension=Dimension.STATES,
        accounts=(Account.OPTIMIZER_STATES,),
        fidelity=Fidelity.NUMERICS,
        needs="bitsandbytes",
        boundary="Embeddings and small tensors keep 32-bit states; gains nothing beside small adapters.",
        why_not=_states_why_not,
        apply=_states(Optimizer.ADAMW_8BIT),
    ),
    Technique(
        name="paged-adamw-8bit",
        rung=6,
        dimension=Dimension.STATES,
        accounts=(Account.OPTIMIZER_STATES,),
        fidelity=Fidelity.NUMERICS,
        needs="bitsandbytes, managed memory",
        boundary="States page over PCIe once they no longer fit beside the rest.",
        why_not=_states_why_not,
        apply=_states(Optimizer.PAGED_ADAMW_8BIT),
    ),
    Technique(
        name="bf16-states",
        rung=6,
        dimension=Dimension.STATES,
        accounts=(Account.PARAMETERS, Account.GRADIENTS, Account.OPTIMIZER_STATES, Account.ACTIVATIONS),
        fidelity=Fidelity.NUMERICS,
        needs="bf16",
        boundary="Updates below 1/256 of a weight round away: small learning rates stall.",
        why_not=_pure_why_not,
        apply=_pure,
    ),
    Technique(
        name="bf16-adamw-8bit",
        rung=6,
        dimension=Dimension.STATES,
        accounts=(Account.PARAMETERS, Account.GRADIENTS, Account.OPTIMIZER_STATES, Account.ACTIVATIONS),
        fidelity=Fidelity.NUMERICS,
        needs="bf16, bitsandbytes",
        boundary="Updates below 1/256 of a weight round away: small learning rates stall.",
        why_not=lambda config, situation: _pure_why_not(config, situation) or _states_why_not(config, situation),
        apply=lambda config, situation: _pure(_states(Optimizer.ADAMW_8BIT)(config, situation), situation),
    ),
    Technique(
        name="lora",
        rung=7,
        dimension=Dimension.METHOD,
        accounts=(Account.GRADIENTS, Account.OPTIMIZER_STATES, *_WITH_ADAPTERS),
        fidelity=Fidelity.NUMERICS,
        needs="peft, a spec that allows it",
        boundary="Does not cut activations; low rank may not learn a new ability.",
        why_not=_method_why_not(Method.LORA),
        apply=_lora,
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
        apply=_qlora,
    ),
    Technique(
        name="offload-optimizer",
        rung=8,
        dimension=Dimension.OFFLOAD_OPTIMIZER,
        accounts=(Account.OPTIMIZER_STATES, Account.MASTER_WEIGHTS, Account.GRADIENTS),
        fidelity=Fidelity.MEMORY,
        needs="DeepSpeed, host memory for 16 B per trainable parameter and rounding",
        boundary="The step waits for PCIe and the CPU's Adam; long accumulation hides it, small batches do not.",
        why_not=_offload_optimizer_why_not,
        apply=_offload_optimizer,
    ),
    _sharding(
        3,
        9,
        (Account.PARAMETERS, Account.OPTIMIZER_STATES, Account.MASTER_WEIGHTS, Account.GRADIENTS),
        "Gathers weights in every pass: dear over slow links, and buffers outweigh the shards of small models.",
    ),
    Technique(
        name="offload-param",
        rung=10,
        dimension=Dimension.OFFLOAD_PARAM,
        accounts=(Account.PARAMETERS, Account.GRADIENTS),
        fidelity=Fidelity.MEMORY,
        needs="ZeRO-3, optimizer offload, host memory",
        boundary="Every pass moves all weights over PCIe: long micro-batches hide that, short ones wait for it.",
        why_not=_offload_param_why_not,
        apply=_offload_param,
    ),
)


def technique_names() -> tuple[str, ...]:
    """Returns the names that a spec may forbid or require, in ladder order."""
    return tuple(technique.name for technique in LADDER)
