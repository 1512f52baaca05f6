"""Every value of a spec with where it comes from: the spec's own line, a default, or memc's decision and its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from memc.config import Attention, Engine, LossHead, Method, Optimizer, Reference, Task, TrainingConfig
from memc.plan import Infeasible, Plan
from memc.spec import LoadedSpec, Spec
from memc.spec_errors import field_paths
from memc.units import format_gib, format_seconds

UNUSED = "not used"


class Origin(StrEnum):
    """Who said so."""

    SPEC = "spec"
    DEFAULT = "default"
    DECIDED = "decided by memc"
    FACTS = "catalogue"


@dataclass(frozen=True, kw_only=True)
class ResolvedValue:
    """One field of a spec, resolved.

    Attributes:
        field: Dotted field.
        value: Its value, JSON-ready; None when it plays no part.
        origin: Who said so.
        place: File, line and column in the spec; empty unless the spec says it.
        reason: Why it has this value, as a clause.
    """

    field: str
    value: Any
    origin: Origin
    place: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Decision:
    value: Any
    reason: str
    origin: Origin = Origin.DECIDED


def resolution(loaded: LoadedSpec, result: Plan | Infeasible) -> tuple[ResolvedValue, ...]:
    """Returns every field of the spec, in the order of the spec.

    For a refusal, what memc decides is that of the configuration that comes nearest.
    """
    decisions = {**_open_fields(loaded.spec, result), **_pins(loaded.spec, result), **_adapters(loaded.spec, result)}
    return tuple(_value(loaded, field, decisions.get(field)) for field in field_paths(Spec))


def resolution_document(values: tuple[ResolvedValue, ...]) -> list[dict[str, Any]]:
    """Returns the values JSON-ready."""
    return [
        {
            "field": item.field,
            "value": item.value,
            "origin": item.origin.value,
            "place": item.place,
            "reason": item.reason,
        }
        for item in values
    ]


def _value(loaded: LoadedSpec, field: str, decision: _Decision | None) -> ResolvedValue:
    path = tuple(field.split("."))
    _, found = loaded.document.find(path)
    written = _at(loaded.spec.resolved(), path)
    left_open = written is None or written in ("auto", "none") or (field == "method" and len(written) > 1)
    if found == path and not (left_open and decision is not None):
        place = loaded.locate(field)
        where = f"{place.file}:{place.line}:{place.column}"
        return ResolvedValue(
            field=field, value=written, origin=Origin.SPEC, place=where, reason=f"line {place.line} of the spec"
        )
    if decision is None:
        return ResolvedValue(field=field, value=written, origin=Origin.DEFAULT, place="", reason="default of the spec")
    return ResolvedValue(field=field, value=decision.value, origin=decision.origin, place="", reason=decision.reason)


def _at(document: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = document
    for step in path:
        value = value[step]
    return value


def _config(result: Plan | Infeasible) -> TrainingConfig:
    return result.config if isinstance(result, Plan) else result.closest_config


def _open_fields(spec: Spec, result: Plan | Infeasible) -> dict[str, _Decision]:
    """Returns what memc fills in outside `pin` and `lora`."""
    config, budget = _config(result), result.budget
    gib = format_gib
    found = {
        "method": _Decision(value=str(config.method), reason=_method_reason(spec, result)),
        "memory.target": _Decision(
            value=budget.gpu_bytes,
            reason=f"{gib(budget.gpu_bytes)}: capacity {gib(budget.capacity_bytes)} - reserve "
            f"{gib(budget.reserve_bytes)}",
        ),
        "memory.reserve": _Decision(
            value=budget.reserve_bytes,
            reason="spread of the CUDA context and 2 % of the capacity"
            if spec.memory.target is None
            else "what the target leaves of the capacity",
        ),
        "hardware.usd_per_gpu_hour": _Decision(
            value=budget.usd_per_gpu_hour, reason=f"median cloud price of {result.gpu.name}", origin=Origin.FACTS
        ),
        "hardware.network_gbit_per_second": _Decision(
            value=None, reason="not given: the adapters that nodes of the card's generation usually have"
        ),
        "hardware.file": _Decision(value=None, reason=_file_reason(result)),
        "hardware.host_memory": _Decision(value=None, reason="not given: not checked, and nothing is offloaded"),
        "data.mean_tokens": _Decision(
            value=spec.data.max_length, reason="every sample is taken to have max_length tokens, an upper bound"
        ),
    }
    if budget.usd_per_gpu_hour is None:
        found["hardware.usd_per_gpu_hour"] = _Decision(value=None, reason="the catalogue has no price: no cost is said")
    if isinstance(result, Plan):
        found |= _run(spec, result)
    else:
        for name in ("learning_rate", "save_steps", "eval_steps"):
            found[f"training.{name}"] = _Decision(value=None, reason="not decided: nothing fits")
    return found


def _file_reason(result: Plan | Infeasible) -> str:
    """Returns what stands in the place of a hardware file."""
    own = result.gpu.calibration
    return "not given: the catalogue's figures" if own is None else f"not given: the {own.origin} of {result.gpu.key}"


def _method_reason(spec: Spec, result: Plan | Infeasible) -> str:
    config = _config(result)
    allowed = ", ".join(spec.methods)
    if isinstance(result, Infeasible):
        return f"of {allowed}, that of the nearest configuration"
    if config.method is spec.methods[0]:
        return f"first of {allowed}, and it fits"
    return _technique(result, str(config.method)) or f"of {allowed}"


def _run(spec: Spec, plan: Plan) -> dict[str, _Decision]:
    """Returns the cadence and the learning rate of the script."""
    run = plan.run
    per_epoch = plan.total_steps is not None and not spec.training.max_steps
    cadence = "once per epoch" if per_epoch else "the length of an epoch is unknown"
    decided = {
        "training.learning_rate": _Decision(value=run.learning_rate, reason=_rate_reason(plan.config)),
        "training.save_steps": _Decision(value=run.save_steps, reason=_saves(plan, spec) or cadence),
        "training.eval_steps": _Decision(
            value=run.eval_steps, reason=cadence if spec.data.eval is not None else "there is no evaluation file"
        ),
    }
    if spec.training.max_steps:
        decided["training.epochs"] = _Decision(value=None, reason="max_steps decides")
    elif spec.training.epochs == 3.0:
        decided["training.epochs"] = _Decision(
            value=3.0, reason="neither epochs nor max_steps is given", origin=Origin.DEFAULT
        )
    if spec.data.samples is None:
        counted = "counted in the training file" if plan.total_steps is not None else "the training file is not here"
        decided["data.samples"] = _Decision(value=None, reason=counted)
    return decided


def _saves(plan: Plan, spec: Spec) -> str:
    """Returns how much time lies between two checkpoints, where it is less than an epoch; empty otherwise."""
    mean, epochs = plan.clock.mean_step_seconds, spec.training.epochs
    if mean is None or plan.clock.unknown or plan.total_steps is None or not epochs:
        return ""
    less = plan.run.save_steps < max(1, round(plan.total_steps / epochs))
    limit = f", of the {plan.run.time_limit_hours} h of a job" if plan.run.time_limit_hours else ""
    return f"about every {format_seconds(plan.run.save_steps * mean)}{limit}" if less else ""


def _rate_reason(config: TrainingConfig) -> str:
    return f"usual for method {config.method}" + (" and preference pairs" if config.task is Task.DPO else "")


def _technique(result: Plan | Infeasible, *names: str) -> str:
    """Returns the rung that switched a setting on, with what it saves; empty when none of `names` did."""
    if isinstance(result, Infeasible):
        return "nearest configuration; nothing fits"
    used = next((name for name in result.techniques if any(name.startswith(start) for start in names)), None)
    if used is None:
        return ""
    records = [record for record in result.provenance if record.technique == used]
    saved = max((record.bytes_saved for record in records), default=0)
    rung = f"rung {records[0].rung}, " if records else ""
    return f"{rung}{used}" + (f": saves {format_gib(saved)} of the peak" if saved else "")


def _pins(spec: Spec, result: Plan | Infeasible) -> dict[str, _Decision]:
    """Returns what the solver chose for each choice that the spec may pin."""
    config = _config(result)
    fits_without = "it fits without"

    def chosen(value: Any, names: tuple[str, ...], otherwise: str) -> _Decision:
        return _Decision(value=value, reason=_technique(result, *names) or otherwise)

    sharding = ("zero-", "offload-", "fsdp")
    batch = f"global_batch_size {config.global_batch_size} / (micro-batch {config.micro_batch_size} x "
    stage = config.zero_stage if config.zero is not None else None
    found = {
        "precision": chosen(config.precision.value, ("bf16-",), _precision_reason(result)),
        "engine": chosen(config.engine.value, sharding, _engine_reason(config)),
        "micro_batch_size": chosen(
            config.micro_batch_size, ("accumulate-",), "a GPU's whole share of the global batch"
        ),
        "gradient_accumulation_steps": _Decision(
            value=config.gradient_accumulation_steps, reason=f"{batch}{config.data_parallel_ranks} GPUs)"
        ),
        "activation_checkpointing": chosen(config.checkpoint_every, ("checkpoint-every",), fits_without),
        "checkpoint_offload": chosen(config.checkpoint_offload, ("checkpoint-offload",), fits_without),
        "context_parallel": chosen(config.context_parallel, ("context-parallel",), fits_without),
        "attention": _Decision(value=config.attention.value, reason=_attention_reason(config)),
        "loss": chosen(config.loss.value, ("chunked-loss",), _loss_reason(config)),
        "reference": chosen(
            None if config.reference is Reference.NONE else config.reference.value,
            ("precomputed-reference",),
            _reference_reason(config),
        ),
        "optimizer": chosen(config.optimizer.value, ("adamw-", "paged-", "bf16-adamw"), _optimizer_reason(config)),
        "hybrid_sharding": chosen(_hybrid(config), ("zero-3-hybrid", "fsdp-hybrid"), fits_without),
        "zero_stage": chosen(stage, sharding, fits_without if config.zero is None else "asked by a pin"),
        "offload_optimizer": chosen(config.offload_optimizer.value, ("offload-optimizer",), fits_without),
        "offload_param": chosen(config.offload_param.value, ("offload-param",), fits_without),
        "expandable_segments": _Decision(value=config.expandable_segments, reason="keeps fragmentation low"),
        "gradient_as_bucket_view": _Decision(
            value=config.gradient_as_bucket_view if config.engine is Engine.DDP else None,
            reason="saves a second copy of the gradients" if config.engine is Engine.DDP else f"{UNUSED}: no DDP",
        ),
        "double_quantization": _Decision(
            value=config.double_quantization if config.method is Method.QLORA else None,
            reason="saves 0.37 bits per base parameter"
            if config.method is Method.QLORA
            else f"{UNUSED}: no 4-bit base",
        ),
        "eval_batch_size": _Decision(
            value=config.eval_batch_size or None,
            reason="as the micro-batch" if config.eval_batch_size else f"{UNUSED}: there is no evaluation file",
        ),
        "padding_mask": _Decision(value=config.padding_mask, reason=_mask_reason(config)),
        **_deepspeed(config),
        **_engine_states(config, chosen),
        **_fsdp(config),
    }
    return {f"pin.{name}": decision for name, decision in found.items()}


def _precision_reason(result: Plan | Infeasible) -> str:
    have = "has" if result.gpu.bf16 else "has no"
    return f"{result.gpu.name} {have} bf16 matrix units"


def _engine_reason(config: TrainingConfig) -> str:
    if config.engine in (Engine.DEEPSPEED, Engine.FSDP):
        return f"a pin asks for {config.engine}"
    return "one GPU" if config.world_size == 1 else f"{config.world_size} GPUs, and no rung needs DeepSpeed"


def _attention_reason(config: TrainingConfig) -> str:
    if config.attention is Attention.EAGER:
        return "the model caps its attention scores, which no other implementation does"
    return "picks the best kernel of the card"


def _loss_reason(config: TrainingConfig) -> str:
    if config.loss is LossHead.PLAIN:
        return "it fits with all logits"
    return "the loss of TRL's trainer, in tiles" if config.task in (Task.SFT, Task.DPO) else "asked"


def _reference_reason(config: TrainingConfig) -> str:
    return {
        Reference.NONE: f"{UNUSED}: task {config.task} has no reference",
        Reference.ADAPTERS_OFF: "the model itself, its adapters switched off",
        Reference.MODEL: "a frozen second model fits",
        Reference.PRECOMPUTED: "asked by a pin",
    }[config.reference]


def _optimizer_reason(config: TrainingConfig) -> str:
    return "AdamW with 32-bit states" if config.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH) else "asked"


def _mask_reason(config: TrainingConfig) -> str:
    if config.packing:
        return "packed sequences need no padding"
    return "batches of more than one are padded" if config.padding_mask else "a batch of one needs no padding"


def _deepspeed(config: TrainingConfig) -> dict[str, _Decision]:
    """Returns DeepSpeed's settings; those that the stage does not read play no part."""
    zero = config.zero
    rows = {
        "overlap_comm": ((1, 2, 3), "overlap_comm", "reduction overlaps with backward"),
        "reduce_bucket_size": ((1, 2, 3), "reduce_bucket_elements", "hidden size squared"),
        "allgather_bucket_size": ((1, 2), "allgather_bucket_elements", "DeepSpeed's default"),
        "prefetch_bucket_size": ((3,), "prefetch_elements", "0.9 x hidden size squared"),
        "param_persistence_threshold": ((3,), "persistence_elements", "10 x hidden size"),
        "max_live_parameters": ((3,), "max_live_elements", "DeepSpeed's default"),
        "sub_group_size": ((3,), "sub_group_elements", "DeepSpeed's default"),
    }
    found = {}
    for name, (stages, attribute, reason) in rows.items():
        if zero is None or zero.stage not in stages:
            why = "no DeepSpeed" if zero is None else f"ZeRO stage {zero.stage} does not read it"
            found[name] = _Decision(value=None, reason=f"{UNUSED}: {why}")
        else:
            found[name] = _Decision(value=getattr(zero, attribute), reason=reason)
    return found


def _hybrid(config: TrainingConfig) -> bool:
    return config.fsdp.hybrid if config.fsdp is not None else config.zero is not None and config.zero.hpz_partition > 1


def _engine_states(
    config: TrainingConfig, chosen: Callable[[Any, tuple[str, ...], str], _Decision]
) -> dict[str, _Decision]:
    """Returns the data types of DeepSpeed's masters and moments."""
    zero = config.zero
    if zero is None:
        unused = _Decision(value=None, reason=f"{UNUSED}: no DeepSpeed")
        return {"bf16_master_weights": unused, "bf16_optimizer_states": unused}
    why = "masters and moments stay fp32"
    return {
        "bf16_master_weights": chosen(zero.bf16_master_weights, ("zero-bf16-states",), why),
        "bf16_optimizer_states": chosen(zero.bf16_states, ("zero-bf16-states",), why),
    }


def _fsdp(config: TrainingConfig) -> dict[str, _Decision]:
    """Returns FSDP's settings; without FSDP they play no part."""
    fsdp = config.fsdp
    names = ("fsdp_version", "reshard_after_forward", "reduce_each_micro_batch", "sharded_checkpoints")
    if fsdp is None:
        return dict.fromkeys(names, _Decision(value=None, reason=f"{UNUSED}: no FSDP"))
    return {
        "fsdp_version": _Decision(value=fsdp.version, reason="a shard of each parameter"),
        "reshard_after_forward": _Decision(
            value=fsdp.reshard_after_forward, reason="frees a layer's weights between forward and backward"
        ),
        "reduce_each_micro_batch": _Decision(
            value=fsdp.reduce_each_micro_batch, reason="only shards of gradients accumulate"
        ),
        "sharded_checkpoints": _Decision(value=fsdp.sharded_checkpoints, reason="no rank holds the whole state"),
    }


def _adapters(spec: Spec, result: Plan | Infeasible) -> dict[str, _Decision]:
    """Returns the adapters' settings, under `lora` where it is left open there and under `pin`."""
    config = _config(result)
    lora = config.lora
    if lora is None:
        unused = _Decision(value=None, reason=f"{UNUSED}: method {config.method} has no adapters")
        names = ("lora.rank", "lora.alpha", "pin.lora_rank", "pin.lora_alpha", "pin.lora_dropout")
        return dict.fromkeys((*names, "pin.target_modules", "pin.adapter_precision"), unused)
    rank = _Decision(value=lora.rank, reason=f"usual for task {config.task}")
    if spec.lora.rank is not None:
        rank = _Decision(value=lora.rank, reason="as lora.rank")
    alpha = _Decision(value=lora.alpha, reason="as lora.alpha" if spec.lora.alpha is not None else "2 x rank")
    modules = _Decision(value=list(lora.target_modules), reason="as lora.target_modules, by the names of this model")
    base = config.engine is Engine.DEEPSPEED
    why = "DeepSpeed keeps fp32 masters beside adapters in the base's type" if base else "as lora.precision"
    if config.engine is Engine.FSDP and config.method is Method.LORA:
        why = "accelerate turns trainable parameters to fp32 before FSDP shards them"
    why = _technique(result, "adapters-in-base") or why
    return {
        "lora.rank": rank,
        "lora.alpha": alpha,
        "pin.lora_rank": rank,
        "pin.lora_alpha": alpha,
        "pin.lora_dropout": _Decision(value=lora.dropout, reason="as lora.dropout"),
        "pin.target_modules": modules,
        "pin.adapter_precision": _Decision(value=lora.precision.value, reason=why),
    }
