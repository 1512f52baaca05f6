"""The verdict: the sentences that answer a spec, the same in the terminal, in PLAN.md and in the HTML report."""

from __future__ import annotations

from memc.clock.steptime import StepTime
from memc.config import Engine, Offload, TrainingConfig
from memc.facts.records import Sees
from memc.ledger.entries import Account, Resource, ResourceLedger
from memc.plan import Certified, Infeasible, Plan
from memc.units import format_gib, format_seconds

_FULL_LENGTH = 0.98


def plan_verdict(plan: Plan) -> list[str]:
    """Returns the lines that come first: does it fit, where is the peak, how long it takes, what the plan is."""
    bill, budget = plan.ledger.gpu, plan.budget
    spare = budget.gpu_bytes - bill.required_bytes
    size, account = _largest(bill)
    cards = f"{plan.config.world_size} x {plan.gpu.name}"
    return [
        f"FITS: {format_gib(bill.required_bytes)} of {format_gib(budget.gpu_bytes)} on {cards}, "
        f"{format_gib(spare)} to spare (rung {plan.rung}: {', '.join(plan.techniques) or 'as asked'})",
        f"PEAK: phase {bill.binding_phase}, largest account {account} with {format_gib(size)}; {_wall(account)}",
        _time(plan),
        f"PLAN: {describe(plan.config)}",
        *([_traced(plan.traced)] if plan.traced is not None else []),
    ]


def _time(plan: Plan) -> str:
    clock, total = plan.clock, plan.clock.total_seconds
    if clock.unknown:
        return f"TIME: unknown, the catalogue has no {' and no '.join(clock.unknown)} of {plan.gpu.key}"
    run = f"{format_seconds(total)} for {plan.total_steps} steps" if total is not None else "length of the run unknown"
    cost = f", about ${clock.total_usd:.2f}" if clock.total_usd is not None else ""
    return (
        f"TIME: {format_seconds(clock.step_seconds)} per step{_of_full_length(clock)}, {_throughput(plan)}; {run}{cost}"
    )


def _throughput(plan: Plan) -> str:
    """Returns tokens per second, of a mean step too; images per second of a model whose samples are no text."""
    clock, sees = plan.clock, plan.model.sees
    if sees is not Sees.TEXT:
        rate = plan.config.global_batch_size / clock.step_seconds / plan.config.world_size
        return f"{rate:,.0f} samples of {plan.model.positions_per_item} {sees} positions a second per GPU"
    return f"{clock.tokens_per_second_per_gpu:,.0f} tokens/s per GPU{_mean(clock)}"


def _traced(certified: Certified) -> str:
    """Returns how the total is known by a trace, and how far the closed forms are from it."""
    comparison = certified.comparison
    versions = ", ".join(f"{name} {version}" for name, version in certified.step.versions.items())
    peak = comparison.peak
    return (
        f"TRACED: {format_gib(peak.traced_bytes)} allocated in phase {peak.phase}; the closed forms say "
        f"{format_gib(comparison.ledger_peak_bytes)} ({-comparison.difference_share:+.2%}); {versions}"
    )


def _of_full_length(clock: StepTime) -> str:
    return " of full length" if _mean(clock) else ""


def _mean(clock: StepTime) -> str:
    """Returns time and throughput of a mean step, where samples are shorter than the longest that is planned for."""
    mean, rate = clock.mean_step_seconds, clock.mean_tokens_per_second_per_gpu
    if mean is None or rate is None or clock.length_share > _FULL_LENGTH:
        return ""
    return f"; {format_seconds(mean)} on average, {rate:,.0f} tokens/s per GPU"


def refusal_verdict(refusal: Infeasible) -> list[str]:
    """Returns the lines that come first: by how much it does not fit, why, and what comes nearest."""
    first = f"DOES NOT FIT: {refusal.model.key} on {refusal.closest_config.world_size} x {refusal.gpu.name}"
    if refusal.binding == "time":
        first = f"TOO SLOW: {refusal.model.key} on {refusal.closest_config.world_size} x {refusal.gpu.name}"
    elif refusal.shortfall_bytes:
        first += f", {format_gib(refusal.shortfall_bytes)} short on {_where(refusal.binding)}"
    return [first, *(f"  {cause}" for cause in refusal.causes), f"NEAREST: {describe(refusal.closest_config)}"]


def describe(config: TrainingConfig) -> str:
    """Returns one line on a configuration."""
    words = [str(config.method), str(config.precision)]
    if config.lora is not None:
        words.append(f"rank {config.lora.rank}")
    words.append(f"micro-batch {config.micro_batch_size} x {config.gradient_accumulation_steps}")
    words.append(f"{config.max_length} tokens")
    if config.checkpoint_every:
        every = "every layer" if config.checkpoint_every == 1 else f"every {config.checkpoint_every} layers"
        words.append(f"checkpointing {every}" + (" to the host" if config.checkpoint_offload else ""))
    if config.zero is not None:
        words.append(f"ZeRO-{config.zero.stage}" if config.zero.stage else "DeepSpeed")
        if config.zero.bf16_master_weights:
            words.append("bf16 masters")
        if config.zero.hpz_partition > 1:
            words.append("weights gathered within a node")
    elif config.fsdp is not None:
        words.append(f"FSDP{config.fsdp.version}" + (" within a node" if config.fsdp.hybrid else ""))
    elif config.engine is Engine.DDP:
        words.append("DDP")
    words += [f"{name} on {place}" for name, place in _offloads(config)]
    if config.context_parallel > 1:
        words.append(f"{config.context_parallel} GPUs share each sequence")
    on_cpu = config.zero is not None and config.zero.offload_optimizer is not Offload.NONE
    words += ["DeepSpeedCPUAdam" if on_cpu else str(config.optimizer), str(config.attention), f"{config.loss} loss"]
    return ", ".join(words)


_PLACES = {Offload.CPU: "the CPU", Offload.NVME: "NVMe"}


def _offloads(config: TrainingConfig) -> list[tuple[str, str]]:
    """Returns (what, where) of what leaves the GPU."""
    both = (("optimizer", config.offload_optimizer), ("parameters", config.offload_param))
    return [(name, _PLACES[where]) for name, where in both if where in _PLACES]


def _where(binding: Resource | str) -> str:
    return "the host" if binding is Resource.HOST else "each GPU"


def _largest(bill: ResourceLedger) -> tuple[int, Account]:
    accounts = bill.by_account()
    account = max(accounts, key=lambda key: accounts[key])
    return accounts[account], account


def _wall(account: Account) -> str:
    if account is Account.ACTIVATIONS:
        return "the wall is dynamic (micro-batch and length)"
    if account is Account.WORKSPACE:
        return "the wall is workspace (buffers)"
    return "the wall is static (weights and states)"
