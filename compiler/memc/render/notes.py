"""What PLAN.md is written from: sentences and tables, as text."""

from __future__ import annotations

from typing import Any

from memc.config import Engine, FsdpConfig, Method, Reference, TrainingConfig
from memc.facts.calibration import calibration_lines
from memc.ledger.entries import Account, Moment, Phase, Resource, ResourceLedger
from memc.plan import Plan, TrailStep
from memc.units import GIB, format_gib, format_seconds
from memc.verdict import plan_verdict


def notes(plan: Plan) -> dict[str, Any]:
    """Returns the values of PLAN.md: display strings and rows of display strings, nothing left to compute."""
    return {
        "title": plan.name,
        "verdict": plan_verdict(plan),
        "warnings": list(plan.warnings),
        "settings": settings(plan),
        "phases": [phase.value for phase in _phases(plan.ledger.gpu)],
        "accounts": account_rows(plan.ledger.gpu),
        "entries": entry_rows(plan.ledger.gpu),
        "other_resources": [_resource_line(plan, resource) for resource in (Resource.HOST, Resource.NVME)],
        "traced": traced_rows(plan),
        "trace_notes": trace_notes(plan),
        "trail": [_trail_row(step) for step in plan.trail],
        "keys": key_rows(plan),
        "assumptions": list(plan.clock.assumptions),
        "measured": calibration_lines(plan.gpu),
        "uncertainty": format_gib(plan.ledger.gpu.uncertainty_bytes),
        "multi_node": plan.config.nodes > 1,
        "nodes": plan.config.nodes,
        "deepspeed": plan.config.engine is Engine.DEEPSPEED,
        "adapters": plan.config.method is not Method.FULL,
        "output_dir": plan.run.output_dir,
    }


def traced_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """Returns (phase, traced, closed forms, difference) of every phase that the plan's trace covers."""
    if plan.traced is None:
        return []
    return [
        (
            item.phase.value,
            format_gib(item.traced_bytes),
            format_gib(item.ledger_bytes),
            f"{item.ledger_bytes / item.traced_bytes - 1:+.2%}",
        )
        for item in plan.traced.comparison.phases
    ]


def trace_notes(plan: Plan) -> list[str]:
    """Returns what was run to trace the plan, what was assumed, and what the trace leaves out."""
    if plan.traced is None:
        return []
    step = plan.traced.step
    depths = ", ".join(f"{stack.traced_layers} of {stack.layers} layers of {stack.name}" for stack in step.stacks)
    versions = ", ".join(f"{name} {version}" for name, version in step.versions.items())
    return [
        f"Run: {depths}; the others repeat them. {versions}.",
        *(f"Assumed: {line}." for line in step.assumes),
        *(f"Not traced: {line}." for line in step.not_modelled),
    ]


def settings(plan: Plan) -> list[tuple[str, str]]:
    """Returns (name, value) of the choices that a reader looks for first."""
    config = plan.config
    return [
        ("model", plan.run.model),
        ("training file", plan.run.train_data),
        ("task", config.task.value),
        ("method", _method(config)),
        ("engine", _engine(config)),
        ("learning rate", f"{plan.run.learning_rate:g}, {plan.run.lr_scheduler}, warm-up {plan.run.warmup_ratio:g}"),
        ("length", f"{plan.run.max_steps} steps" if plan.run.max_steps else f"{plan.run.epochs:g} epochs"),
        ("checkpoints", f"every {plan.run.save_steps} steps" if plan.run.save_steps else "none on the way"),
        ("seed", str(plan.run.seed)),
        ("precision", config.precision.value),
        (
            "batch",
            f"{config.global_batch_size} = {config.micro_batch_size} × {config.gradient_accumulation_steps} accumulated"
            f" × {config.data_parallel_ranks} " + ("GPU(s)" if config.context_parallel == 1 else "groups of GPUs"),
        ),
        ("length", f"{config.max_length} tokens, {'packed' if config.packing else 'one sample per row'}"),
        ("activation checkpointing", _checkpointing(config)),
        ("attention", config.attention.value),
        ("loss", config.loss.value),
        *_preference(plan),
        ("optimizer", config.optimizer.value),
    ]


def _preference(plan: Plan) -> list[tuple[str, str]]:
    """Returns the loss of preference training and where its reference is; nothing for other tasks."""
    dpo = plan.run.dpo
    if dpo is None:
        return []
    smoothing = f", label smoothing {dpo.label_smoothing:g}" if dpo.label_smoothing else ""
    reference = {
        Reference.ADAPTERS_OFF: "the model itself, its adapters switched off",
        Reference.MODEL: "a frozen second model",
        Reference.PRECOMPUTED: "log-probabilities of all pairs, computed before the first step",
    }
    return [
        ("preference loss", f"{dpo.loss}, beta {dpo.beta:g}{smoothing}"),
        ("reference", reference[plan.config.reference]),
    ]


def _method(config: TrainingConfig) -> str:
    if config.lora is None:
        return config.method.value
    lora = config.lora
    return f"{config.method.value}, rank {lora.rank}, alpha {lora.alpha}, on {', '.join(lora.target_modules)}"


def _engine(config: TrainingConfig) -> str:
    if config.fsdp is not None:
        return _fsdp(config, config.fsdp)
    if config.zero is None:
        return config.engine.value
    zero = config.zero
    offloads = [f"optimizer on {zero.offload_optimizer.value}"] if zero.offload_optimizer.value != "none" else []
    offloads += [f"parameters on {zero.offload_param.value}"] if zero.offload_param.value != "none" else []
    offloads += [f"a second copy of the weights in every node, over {zero.hpz_partition} GPUs"] * (
        zero.hpz_partition > 1
    )
    offloads += ["bf16 master weights"] * zero.bf16_master_weights + ["bf16 moments"] * zero.bf16_states
    return f"{config.engine.value}, ZeRO-{zero.stage}" + "".join(f", {offload}" for offload in offloads)


def _fsdp(config: TrainingConfig, fsdp: FsdpConfig) -> str:
    parts = [f"FSDP{fsdp.version} over {config.shard_ranks} GPUs"]
    parts += ["replicated across nodes"] * fsdp.hybrid
    parts += ["weights kept between forward and backward"] * (not fsdp.reshard_after_forward)
    parts += [f"weights, gradients and states on {fsdp.offload.value}"] * (fsdp.offload.value != "none")
    parts += [f"{config.context_parallel} GPUs share each sequence"] * (config.context_parallel > 1)
    return ", ".join(parts)


def _checkpointing(config: TrainingConfig) -> str:
    if config.checkpoint_every == 0:
        return "off"
    every = "every layer" if config.checkpoint_every == 1 else f"every {config.checkpoint_every} layers"
    return every + (", their inputs on the host" if config.checkpoint_offload else "")


def _phases(ledger: ResourceLedger) -> list[Phase]:
    """Returns the phases in which anything is alive, in order."""
    sizes = ledger.by_phase()
    return [phase for phase in Phase if sizes[phase]]


def _peak_moment(ledger: ResourceLedger, phase: Phase) -> Moment:
    moments = [moment for moment in Moment if moment.phase is phase]
    return max(moments, key=lambda moment: ledger.by_moment[moment])


def account_rows(ledger: ResourceLedger) -> list[tuple[str, list[str]]]:
    """Returns (account, GiB by phase) at the peak of each phase, with two sums below.

    The last row is what the card must have: it adds what the allocator holds beyond what is allocated, and what lies
    outside the allocator. Both are counted in every phase, since neither is given back.
    """
    moments = [_peak_moment(ledger, phase) for phase in _phases(ledger)]
    sums = [ledger.by_account(moment) for moment in moments]
    rows = [
        (account.value, [_gib(by_account[account]) for by_account in sums])
        for account in Account
        if any(by_account[account] for by_account in sums)
    ]
    above = ledger.reserved_above_allocated_bytes + ledger.outside_allocator_bytes
    rows.append(("allocated", [_gib(ledger.by_moment[moment]) for moment in moments]))
    rows.append(("required", [_gib(ledger.by_moment[moment] + above) for moment in moments]))
    return rows


def entry_rows(ledger: ResourceLedger) -> list[tuple[str, str, str, str, str]]:
    """Returns (account, entry, size, formula, source) of every entry, in account order."""
    return [
        (entry.account.value, entry.name, format_gib(entry.bytes), entry.formula, entry.source)
        for entry in ledger.entries
    ]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"


def _resource_line(plan: Plan, resource: Resource) -> str:
    ledger = plan.ledger.of(resource)
    if not ledger.entries:
        return f"{resource.value}: nothing counted."
    limit = plan.budget.host_bytes if resource is Resource.HOST else plan.budget.nvme_bytes
    allowed = f" of {format_gib(limit)}" if limit is not None else " (the spec names no limit)"
    return (
        f"{resource.value}: {format_gib(ledger.required_bytes)}{allowed} on each node, "
        f"largest in {ledger.binding_phase.value}."
    )


def _trail_row(step: TrailStep) -> tuple[str, str, str, str, str, str, str]:
    return (
        str(step.rung),
        step.technique,
        step.verdict.value,
        "" if step.peak_bytes is None else format_gib(step.peak_bytes),
        "" if step.shortfall_bytes is None else format_gib(step.shortfall_bytes),
        "" if step.step_seconds is None else format_seconds(step.step_seconds),
        step.reason + (f" ({step.fidelity})" if step.fidelity else ""),
    )


def key_rows(plan: Plan) -> list[tuple[str, str, str, str, str]]:
    """Returns (technique, rung, keys, main account, saved) of every technique that set a key."""
    keys: dict[str, list[str]] = {}
    for origin in plan.provenance:
        keys.setdefault(origin.technique, []).append(f"{origin.file}: {origin.key}")
    firsts = {origin.technique: origin for origin in reversed(plan.provenance)}
    return [
        (
            name,
            str(firsts[name].rung) if firsts[name].rung else "spec",
            ", ".join(named),
            firsts[name].account,
            format_gib(firsts[name].bytes_saved) if firsts[name].bytes_saved else "",
        )
        for name, named in keys.items()
    ]
