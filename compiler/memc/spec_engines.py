"""Contradictions within a spec between an engine and the settings that only one engine, or one stage of it, has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memc.config import Engine, Offload
from memc.spec_fields import Spec
from memc.spec_findings import Finding, yaml_text
from memc.spec_values import Scheduler

ZERO_PINS = (
    "overlap_comm",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "sub_group_size",
)
STATE_PINS = ("bf16_master_weights", "bf16_optimizer_states")
FSDP_PINS = ("fsdp_version", "reshard_after_forward", "reduce_each_micro_batch", "sharded_checkpoints")
ZERO_3_PINS = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "sub_group_size")


def _engine(spec: Spec) -> Iterator[Finding]:
    pin = spec.pin
    if pin.engine is Engine.SINGLE and spec.world_size > 1:
        yield Finding(
            code="spec-single-with-many-gpus",
            field="pin.engine",
            message=f"engine single runs one process, but the hardware has {spec.world_size} GPUs",
            hint="write `engine: ddp`, `engine: fsdp` or `engine: deepspeed`, or `count: 1` and `nodes: 1`",
            also=("hardware.count", "hardware.nodes"),
        )
    if pin.engine is not None:
        yield from _settings_of_other_engines(spec, pin.engine)
        return
    zero = _of_deepspeed(spec)
    for name in FSDP_PINS:
        if zero and getattr(pin, name) is not None:
            yield Finding(
                code="spec-settings-of-two-engines",
                field=f"pin.{name}",
                message=f"`{name}` is a setting of FSDP and `{zero[0]}` is one of DeepSpeed; one of them runs the step",
                hint="remove one of the two",
                also=(f"pin.{zero[0]}",),
            )


def _set(spec: Spec, name: str) -> bool:
    """Whether a pin asks for something rather than switching it off."""
    value = getattr(spec.pin, name)
    return value is not None and value is not False and value != Offload.NONE and (name, value) != ("zero_stage", 0)


def _of_deepspeed(spec: Spec) -> list[str]:
    """Returns the pins that only DeepSpeed can keep; offload to the CPU is FSDP's too."""
    disk = [name for name in ("offload_optimizer", "offload_param") if getattr(spec.pin, name) is Offload.NVME]
    return [name for name in ("zero_stage", *ZERO_PINS, *STATE_PINS) if _set(spec, name)] + disk


def _settings_of_other_engines(spec: Spec, engine: Engine) -> Iterator[Finding]:
    """Yields pins that the pinned engine does not have."""
    pin = spec.pin
    if engine is not Engine.DEEPSPEED:
        offloads = ("offload_optimizer", "offload_param")
        for name in ("zero_stage", *offloads, *ZERO_PINS, *STATE_PINS):
            value = getattr(pin, name)
            if _set(spec, name) and not (engine is Engine.FSDP and name in offloads and value is Offload.CPU):
                yield Finding(
                    code="spec-setting-needs-deepspeed",
                    field=f"pin.{name}",
                    message=f"`{name}: {yaml_text(value)}` is a setting of DeepSpeed, but `pin.engine` is {engine}",
                    hint=f"write `engine: deepspeed`, or remove `{name}`",
                    also=("pin.engine",),
                )
    if engine is not Engine.FSDP:
        for name in FSDP_PINS:
            value = getattr(pin, name)
            if value is not None:
                yield Finding(
                    code="spec-setting-needs-fsdp",
                    field=f"pin.{name}",
                    message=f"`{name}: {yaml_text(value)}` is a setting of FSDP, but `pin.engine` is {engine}",
                    hint=f"write `engine: fsdp`, or remove `{name}`",
                    also=("pin.engine",),
                )
    if engine in (Engine.SINGLE, Engine.DDP) and pin.hybrid_sharding:
        yield Finding(
            code="spec-hybrid-without-sharding",
            field="pin.hybrid_sharding",
            message=f"`hybrid_sharding` says where shards lie, but engine {engine} shards nothing",
            hint="write `engine: fsdp` or `engine: deepspeed`, or remove `hybrid_sharding`",
            also=("pin.engine",),
        )


def _hybrid(spec: Spec) -> Iterator[Finding]:
    pin = spec.pin
    if pin.hybrid_sharding and spec.hardware.nodes == 1:
        yield Finding(
            code="spec-hybrid-on-one-node",
            field="pin.hybrid_sharding",
            message="`hybrid_sharding` keeps gathering within a node, and there is only one node",
            hint="remove `hybrid_sharding`, or write `nodes: 2` or more below `hardware`",
            also=("hardware.nodes",),
        )
    if pin.hybrid_sharding and pin.zero_stage not in (None, 3):
        yield Finding(
            code="spec-setting-of-other-stage",
            field="pin.hybrid_sharding",
            message=f"`hybrid_sharding` has a meaning in ZeRO stage 3 only, but `zero_stage` is {pin.zero_stage}",
            hint="remove `hybrid_sharding`, or write `zero_stage: 3`",
            also=("pin.zero_stage",),
        )


def _state_types(spec: Spec) -> Iterator[Finding]:
    pin = spec.pin
    if pin.bf16_optimizer_states and pin.bf16_master_weights is False:
        yield Finding(
            code="spec-bf16-states-need-bf16-masters",
            field="pin.bf16_optimizer_states",
            message="`bf16_optimizer_states: true` needs `bf16_master_weights`, which is false",
            hint="write `bf16_master_weights: true`, or remove `bf16_optimizer_states`",
            also=("pin.bf16_master_weights",),
        )
    names = [name for name in STATE_PINS if getattr(pin, name)]
    if names and pin.zero_stage == 0:
        yield Finding(
            code="spec-setting-of-other-stage",
            field=f"pin.{names[0]}",
            message=f"`{names[0]}` has a meaning in ZeRO stage 1, 2 or 3 only, but `zero_stage` is 0",
            hint=f"remove `{names[0]}`, or write `zero_stage: 1`",
            also=("pin.zero_stage",),
        )


def _checkpoint_offload(spec: Spec) -> Iterator[Finding]:
    pin = spec.pin
    if pin.checkpoint_offload and pin.activation_checkpointing == 0:
        yield Finding(
            code="spec-checkpoint-offload-without-checkpointing",
            field="pin.checkpoint_offload",
            message="`checkpoint_offload` moves what checkpointing keeps, but `activation_checkpointing` is off",
            hint="write `activation_checkpointing: true`, or remove `checkpoint_offload`",
            also=("pin.activation_checkpointing",),
        )


def _context_parallel(spec: Spec) -> Iterator[Finding]:
    size = spec.pin.context_parallel
    if size is None or size == 1:
        return
    if spec.world_size % size:
        yield Finding(
            code="spec-context-parallel",
            field="pin.context_parallel",
            message=f"{size} GPUs that share each sequence do not divide {spec.world_size} GPUs",
            hint="write a divisor of the number of GPUs",
            also=("hardware.count", "hardware.nodes"),
        )
    zero = next(iter(_of_deepspeed(spec)), None)
    if spec.pin.engine not in (None, Engine.FSDP):
        yield Finding(
            code="spec-context-parallel-engine",
            field="pin.context_parallel",
            message=f"`context_parallel: {size}` needs FSDP, but `pin.engine` is {spec.pin.engine}",
            hint="write `engine: fsdp`, or remove `context_parallel`",
            also=("pin.engine",),
        )
    elif spec.pin.engine is None and zero is not None:
        yield Finding(
            code="spec-context-parallel-engine",
            field="pin.context_parallel",
            message=f"`context_parallel: {size}` needs FSDP, but `{zero}` is a setting of DeepSpeed",
            hint="remove one of the two",
            also=(f"pin.{zero}",),
        )


_NEEDED = {
    Scheduler.KUBERNETES: (
        ("image", "a Kubernetes job runs in a container", "`image: registry/name:tag`, with Python and CUDA"),
        ("volume", "a Kubernetes job reads its data from a volume", "`volume: claim`, a claim that holds the data"),
    ),
    Scheduler.SKYPILOT: (
        ("accelerator", "SkyPilot has names of its own for cards", "`accelerator: H100` or the like"),
    ),
}


def _scheduler(spec: Spec) -> Iterator[Finding]:
    launch = spec.launch
    for name, why, example in _NEEDED.get(launch.scheduler, ()):
        if getattr(launch, name) is None:
            yield Finding(
                code="spec-launch-incomplete",
                field="launch.scheduler",
                message=f"{why}, and `launch.{name}` is not given",
                hint=f"add {example}, below `launch`",
                also=(f"launch.{name}", "launch.unknown"),
            )


def _offload(spec: Spec) -> Iterator[Finding]:
    pin = spec.pin
    if pin.offload_param not in (None, Offload.NONE) and pin.zero_stage not in (None, 3):
        yield Finding(
            code="spec-offload-param-needs-zero-3",
            field="pin.offload_param",
            message=f"`offload_param: {pin.offload_param}` needs ZeRO stage 3, but `zero_stage` is {pin.zero_stage}",
            hint="write `zero_stage: 3`, or `offload_param: none`",
            also=("pin.zero_stage",),
        )
    if pin.offload_optimizer is Offload.CPU and pin.zero_stage == 0:
        yield Finding(
            code="spec-offload-optimizer-needs-zero",
            field="pin.offload_optimizer",
            message="`offload_optimizer: cpu` needs ZeRO stage 1, 2 or 3, but `zero_stage` is 0",
            hint="write `zero_stage: 2`, or `offload_optimizer: none`",
            also=("pin.zero_stage",),
        )
    if pin.offload_optimizer is Offload.NVME and pin.zero_stage not in (None, 3):
        yield Finding(
            code="spec-nvme-needs-zero-3",
            field="pin.offload_optimizer",
            message=f"`offload_optimizer: nvme` needs ZeRO stage 3, but `zero_stage` is {pin.zero_stage}",
            hint="write `zero_stage: 3`, or `offload_optimizer: cpu`",
            also=("pin.zero_stage",),
        )


def _zero_settings(spec: Spec) -> Iterator[Finding]:
    stage = spec.pin.zero_stage
    if stage is None:
        return
    unused: tuple[str, ...] = ZERO_3_PINS if stage < 3 else ("allgather_bucket_size",)
    unused += ("allgather_bucket_size",) if stage == 0 else ()
    for name in unused:
        if getattr(spec.pin, name) is not None:
            needed = "3" if name in ZERO_3_PINS else "1 or 2"
            yield Finding(
                code="spec-setting-of-other-stage",
                field=f"pin.{name}",
                message=f"`{name}` has a meaning in ZeRO stage {needed} only, but `zero_stage` is {stage}",
                hint=f"remove `{name}`, or write `zero_stage: {needed[0]}`",
                also=("pin.zero_stage",),
            )


ENGINE_CHECKS: tuple[Callable[[Spec], Iterator[Finding]], ...] = (
    _engine,
    _offload,
    _hybrid,
    _state_types,
    _checkpoint_offload,
    _context_parallel,
    _scheduler,
    _zero_settings,
)
