"""Techniques that spread state over ranks or move it off the GPU: ZeRO, FSDP, offload to host memory and NVMe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memc.config import Engine, Method, Offload, Precision, Reference, TrainingConfig
from memc.ladder.engines import under_deepspeed, under_fsdp
from memc.ladder.states import BITSANDBYTES
from memc.ladder.technique import Dimension, Fidelity, Situation, Technique
from memc.ledger.entries import Account

_STATES = (Account.OPTIMIZER_STATES, Account.MASTER_WEIGHTS, Account.GRADIENTS)
_NO_HOST = "hardware.host_memory is not given"
_NO_NVME = "hardware.nvme is not given"
_WHOLE_BASE = "a 4-bit base is not partitioned at load: every GPU would first hold the whole base"


def _zero(stage: int, *, hybrid: bool = False) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, situation: Situation) -> TrainingConfig:
        hpz = config.gpus_per_node if hybrid else 1
        zero = replace(situation.zero, stage=stage, hpz_partition=hpz)
        if config.zero is not None:  # a pin may have moved something off the GPU already
            held = config.zero
            zero = replace(zero, offload_optimizer=held.offload_optimizer, offload_param=held.offload_param)
        return under_deepspeed(config, zero)

    return apply


def _zero_why_not(stage: int, *, hybrid: bool = False) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, situation: Situation) -> str | None:
        if config.world_size == 1:
            return "over one rank ZeRO divides nothing"
        if config.zero_stage > stage:
            return f"ZeRO-{config.zero_stage} shards more already"
        if config.zero_stage == stage and _zero(stage, hybrid=hybrid)(config, situation) == config:
            return f"ZeRO-{stage} is on already"
        if hybrid and config.nodes == 1:
            return "there is one node: gathering never leaves it"
        if hybrid and config.gpus_per_node == 1:
            return "nodes of one GPU have nothing to shard within"
        if config.optimizer in BITSANDBYTES or config.precision is Precision.BF16_PURE:
            return "DeepSpeed keeps its own fp32 states; 8-bit and bf16 states are another rung"
        if stage == 3 and config.method is Method.QLORA:
            return _WHOLE_BASE
        if config.precision is Precision.FP32:
            return "the run is pinned to fp32"
        return None

    return why_not


def _fsdp(*, hybrid: bool) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, situation: Situation) -> TrainingConfig:
        return under_fsdp(config, replace(situation.fsdp, hybrid=hybrid))

    return apply


def _fsdp_why_not(*, hybrid: bool) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, situation: Situation) -> str | None:
        if config.world_size == 1:
            return "over one rank FSDP divides nothing"
        if config.reference not in (Reference.NONE, Reference.ADAPTERS_OFF):
            return "TRL shards a second model as one piece under FSDP and gathers all of it at once: ZeRO-3 does not"
        if hybrid and config.nodes == 1:
            return "there is one node: gathering never leaves it"
        if hybrid and config.gpus_per_node == 1:
            return "nodes of one GPU have nothing to shard within"
        if config.optimizer in BITSANDBYTES:
            return "bitsandbytes optimizers read plain tensors, FSDP2's shards are DTensors"
        if config.precision is Precision.FP16 and config.method is Method.QLORA:
            return "fp16 gradients of adapters beside a 4-bit base cannot be unscaled"
        return "FSDP1 is priced only" if situation.fsdp.version != 2 else None

    return why_not


def _offload_optimizer(where: Offload) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, situation: Situation) -> TrainingConfig:
        stage = 2 if where is Offload.CPU else 3
        zero = config.zero if config.zero is not None else replace(situation.zero, stage=stage)
        return under_deepspeed(config, replace(zero, offload_optimizer=where))

    return apply


def _offload_optimizer_why_not(where: Offload) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, situation: Situation) -> str | None:
        if config.engine is Engine.FSDP:
            return "FSDP moves weights, gradients and states together: offload-param"
        if situation.host_bytes is None:
            return _NO_HOST
        if where is Offload.NVME and not situation.nvme_bytes:
            return _NO_NVME
        if config.optimizer in BITSANDBYTES or config.precision is Precision.BF16_PURE:
            return "DeepSpeed's CPU Adam keeps fp32 states; 8-bit and bf16 states stay on the GPU"
        if config.precision is Precision.FP32:
            return "the run is pinned to fp32"
        if config.zero is not None and config.zero.stage < 2:
            return "offload needs ZeRO stage 2 or 3"
        if where is Offload.NVME and config.zero is not None and config.zero.stage != 3:
            return "DeepSpeed moves optimizer states to NVMe under ZeRO-3 only"
        if where is Offload.NVME and config.method is Method.QLORA:
            return _WHOLE_BASE
        return None

    return why_not


def _offload_param(where: Offload) -> Callable[[TrainingConfig, Situation], TrainingConfig]:
    def apply(config: TrainingConfig, situation: Situation) -> TrainingConfig:
        if config.fsdp is not None:
            return replace(config, fsdp=replace(config.fsdp, offload=where))
        zero = config.zero if config.zero is not None else situation.zero
        return under_deepspeed(config, replace(zero, stage=3, offload_param=where))

    return apply


def _offload_param_why_not(where: Offload) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, situation: Situation) -> str | None:
        if situation.host_bytes is None:
            return _NO_HOST
        if where is Offload.NVME and not situation.nvme_bytes:
            return _NO_NVME
        if config.engine is Engine.FSDP:
            if where is Offload.NVME:
                return "FSDP moves shards to host memory only"
            if config.method is Method.QLORA:
                return "4-bit weights lose their quantisation state when FSDP moves them off the GPU"
            return "fp16 loss scaling needs gradients on the GPU" if config.precision is Precision.FP16 else None
        zero = config.zero
        if zero is None or zero.offload_optimizer is Offload.NONE:
            return "parameters are offloaded only after the optimizer"
        if config.world_size > 1 and zero.stage != 3:
            return "offloading parameters needs ZeRO stage 3"
        if zero.hpz_partition > 1:
            return "the second copy of hybrid sharding would lie in host memory too"
        if config.method is Method.QLORA:
            return "a 4-bit base is not partitioned by ZeRO-3"
        return None

    return why_not


def _bf16_states(config: TrainingConfig, _situation: Situation) -> TrainingConfig:
    assert config.zero is not None
    return replace(config, zero=replace(config.zero, bf16_master_weights=True, bf16_states=True))


def _bf16_states_why_not(config: TrainingConfig, _situation: Situation) -> str | None:
    zero = config.zero
    if zero is None or not zero.stage:
        return "only DeepSpeed's ZeRO keeps masters beside 16-bit weights"
    if zero.bf16_states:
        return "masters and moments are bf16 already"
    if config.precision is not Precision.BF16:
        return "the card or the spec does not use bf16"
    if config.method is not Method.FULL:
        return "adapters are too small for their states to matter"
    return None


def _sharding(
    name: str,
    rung: int,
    accounts: tuple[Account, ...],
    needs: str,
    boundary: str,
    why_not: Callable[[TrainingConfig, Situation], str | None],
    apply: Callable[[TrainingConfig, Situation], TrainingConfig],
) -> Technique:
    return Technique(
        name=name,
        rung=rung,
        dimension=Dimension.SHARDING,
        accounts=accounts,
        fidelity=Fidelity.MEMORY,
        needs=needs,
        boundary=boundary,
        why_not=why_not,
        apply=apply,
    )


def _offload(
    name: str, rung: int, dimension: Dimension, accounts: tuple[Account, ...], where: Offload, needs: str, boundary: str
) -> Technique:
    optimizer = dimension is Dimension.OFFLOAD_OPTIMIZER
    return Technique(
        name=name,
        rung=rung,
        dimension=dimension,
        accounts=accounts,
        fidelity=Fidelity.MEMORY,
        needs=needs,
        boundary=boundary,
        why_not=_offload_optimizer_why_not(where) if optimizer else _offload_param_why_not(where),
        apply=_offload_optimizer(where) if optimizer else _offload_param(where),
    )


GRADIENT_SHARDING: tuple[Technique, ...] = (
    _sharding(
        "zero-1",
        5,
        _STATES,
        "more than one GPU, DeepSpeed",
        "Weights stay whole on every GPU, gradients until the step.",
        _zero_why_not(1),
        _zero(1),
    ),
    _sharding(
        "zero-2",
        5,
        _STATES,
        "more than one GPU, DeepSpeed",
        "Weights stay whole on every GPU; every micro-batch reduces.",
        _zero_why_not(2),
        _zero(2),
    ),
)
ENGINE_STATES = Technique(
    name="zero-bf16-states",
    rung=6,
    dimension=Dimension.ENGINE_STATES,
    accounts=_STATES,
    fidelity=Fidelity.NUMERICS,
    needs="DeepSpeed ZeRO, bf16",
    boundary="Updates below 1/256 of a weight round away: small learning rates stall.",
    why_not=_bf16_states_why_not,
    apply=_bf16_states,
)
OFFLOAD_OPTIMIZER = _offload(
    "offload-optimizer",
    8,
    Dimension.OFFLOAD_OPTIMIZER,
    _STATES,
    Offload.CPU,
    "DeepSpeed, host memory for 16 B per trainable parameter and rounding",
    "The step waits for PCIe and the CPU's Adam; long accumulation hides it, small batches do not.",
)
_GATHERS = "Gathers weights in every pass: dear over slow links, and buffers outweigh the shards of small models."
_WITH_WEIGHTS = (Account.PARAMETERS, *_STATES)
WEIGHT_SHARDING: tuple[Technique, ...] = (
    _sharding("zero-3", 9, _WITH_WEIGHTS, "more than one GPU, DeepSpeed", _GATHERS, _zero_why_not(3), _zero(3)),
    _sharding(
        "fsdp",
        9,
        (*_WITH_WEIGHTS, Account.ACTIVATIONS),
        "more than one GPU, FSDP2",
        _GATHERS,
        _fsdp_why_not(hybrid=False),
        _fsdp(hybrid=False),
    ),
    _sharding(
        "zero-3-hybrid",
        9,
        _WITH_WEIGHTS,
        "more than one node, DeepSpeed",
        "Keeps a second copy of the weights in every node, so that gathering does not cross the network.",
        _zero_why_not(3, hybrid=True),
        _zero(3, hybrid=True),
    ),
    _sharding(
        "fsdp-hybrid",
        9,
        (*_WITH_WEIGHTS, Account.ACTIVATIONS),
        "more than one node, FSDP2",
        "Every node keeps a whole copy of weights, gradients and states; only gradients cross the network.",
        _fsdp_why_not(hybrid=True),
        _fsdp(hybrid=True),
    ),
)
OFFLOAD_PARAM = _offload(
    "offload-param",
    10,
    Dimension.OFFLOAD_PARAM,
    (Account.PARAMETERS, *_STATES),
    Offload.CPU,
    "ZeRO-3 with optimizer offload, or FSDP2; host memory",
    "Every pass moves all weights over PCIe: long micro-batches hide that, short ones wait for it.",
)
NVME: tuple[Technique, ...] = (
    _offload(
        "offload-optimizer-nvme",
        11,
        Dimension.OFFLOAD_OPTIMIZER,
        (Account.PARAMETERS, *_STATES),
        Offload.NVME,
        "ZeRO-3, DeepSpeed's asynchronous I/O, NVMe space for 16 B per trainable parameter",
        "Every step reads and writes all states over the drive: minutes for large models, and it wears the drive.",
    ),
    _offload(
        "offload-param-nvme",
        11,
        Dimension.OFFLOAD_PARAM,
        (Account.PARAMETERS, *_STATES),
        Offload.NVME,
        "ZeRO-3 with optimizer offload, DeepSpeed's asynchronous I/O, NVMe space",
        "Every pass reads all weights from the drive: long micro-batches hide part of it, short ones wait for it.",
    ),
)
