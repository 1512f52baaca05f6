"""What a person looks at in a terminal: verdict first, then the bill by phase and account, the ladder, the clock."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memc.config import Engine, TrainingConfig
from memc.ledger.entries import Account, Moment, Phase, Resource, ResourceLedger
from memc.plan import Infeasible, Plan, TrailStep, Verdict
from memc.units import GIB, format_gib, format_seconds

_BAR_CELLS = 48
_COLOURS = {
    Account.PARAMETERS: "blue",
    Account.MASTER_WEIGHTS: "cyan",
    Account.GRADIENTS: "green",
    Account.OPTIMIZER_STATES: "magenta",
    Account.ACTIVATIONS: "yellow",
    Account.WORKSPACE: "bright_black",
}
_GLYPHS = dict(zip(Account, "█▓▒░▚▞", strict=True))


def plan_report(plan: Plan) -> RenderableType:
    """Returns the report of a plan."""
    parts: list[RenderableType] = [Text(line) for line in plan_verdict(plan)]
    parts += [Text(""), _bar(plan.ledger.gpu, plan.budget.gpu_bytes), Text(""), _ledger_table(plan.ledger.gpu)]
    parts += [_host_line(plan.ledger.host, plan.budget.host_bytes), Text("")]
    parts += [_trail_table(plan.trail), Text(""), _clock_table(plan)]
    parts += [Text(f"note: {warning}") for warning in (*plan.warnings, *plan.clock.assumptions)]
    return Group(*parts)


def refusal_report(refusal: Infeasible) -> RenderableType:
    """Returns the report of a refusal."""
    parts: list[RenderableType] = [Text(line) for line in _refusal_verdict(refusal)]
    parts += [Text(""), _bar(refusal.closest_ledger.gpu, refusal.budget.gpu_bytes), Text("")]
    parts += [_ledger_table(refusal.closest_ledger.gpu)]
    parts += [_host_line(refusal.closest_ledger.host, refusal.budget.host_bytes), Text("")]
    parts += [_trail_table(refusal.trail), Text(""), _relaxation_table(refusal)]
    return Group(*parts)


def describe(config: TrainingConfig) -> str:
    """Returns one line on a configuration."""
    words = [str(config.method), str(config.precision)]
    if config.lora is not None:
        words.append(f"rank {config.lora.rank}")
    words.append(f"micro-batch {config.micro_batch_size} x {config.gradient_accumulation_steps}")
    words.append(f"{config.max_length} tokens")
    if config.checkpoint_every:
        every = "every layer" if config.checkpoint_every == 1 else f"every {config.checkpoint_every} layers"
        words.append(f"checkpointing {every}")
    if config.zero is not None:
        words.append(f"ZeRO-{config.zero.stage}" if config.zero.stage else "DeepSpeed")
        words += [f"{name} on the CPU" for name, on in _offloads(config) if on]
    elif config.engine is Engine.DDP:
        words.append("DDP")
    words += [str(config.optimizer), str(config.attention), f"{config.loss} loss"]
    return ", ".join(words)


def _offloads(config: TrainingConfig) -> tuple[tuple[str, bool], ...]:
    assert config.zero is not None
    return (
        ("optimizer", config.zero.offload_optimizer.value == "cpu"),
        ("parameters", config.zero.offload_param.value == "cpu"),
    )


def plan_verdict(plan: Plan) -> list[str]:
    """Returns the lines that come first: does it fit, where is the peak, how long it takes, what the plan is."""
    bill, budget = plan.ledger.gpu, plan.budget
    spare = budget.gpu_bytes - bill.required_bytes
    size, account = _largest(bill)
    total = plan.clock.total_seconds
    run = f"{format_seconds(total)} for {plan.total_steps} steps" if total is not None else "length of the run unknown"
    cost = f", about ${plan.clock.total_usd:.2f}" if plan.clock.total_usd is not None else ""
    cards = f"{plan.config.world_size} x {plan.gpu.name}"
    return [
        f"FITS: {format_gib(bill.required_bytes)} of {format_gib(budget.gpu_bytes)} on {cards}, "
        f"{format_gib(spare)} to spare (rung {plan.rung}: {', '.join(plan.techniques) or 'as asked'})",
        f"PEAK: phase {bill.binding_phase}, largest account {account} with {format_gib(size)}; {_wall(account)}",
        f"TIME: {format_seconds(plan.clock.step_seconds)} per step, "
        f"{plan.clock.tokens_per_second_per_gpu:,.0f} tokens/s per GPU; {run}{cost}",
        f"PLAN: {describe(plan.config)}",
    ]


def _refusal_verdict(refusal: Infeasible) -> list[str]:
    first = f"DOES NOT FIT: {refusal.model.key} on {refusal.closest_config.world_size} x {refusal.gpu.name}"
    if refusal.binding == "time":
        first = f"TOO SLOW: {refusal.model.key} on {refusal.closest_config.world_size} x {refusal.gpu.name}"
    elif refusal.shortfall_bytes:
        first += f", {format_gib(refusal.shortfall_bytes)} short on {_where(refusal.binding)}"
    return [first, *(f"  {cause}" for cause in refusal.causes), f"NEAREST: {describe(refusal.closest_config)}"]


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


def _bar(bill: ResourceLedger, budget_bytes: int) -> RenderableType:
    """Returns a stacked bar of the binding phase, scaled to the larger of need and budget."""
    accounts = bill.by_account()
    accounts[Account.WORKSPACE] += bill.required_bytes - sum(accounts.values())
    scale = max(bill.required_bytes, budget_bytes)
    bar, legend, drawn, summed = Text("  "), Text("  "), 0, 0
    for account in Account:
        summed += accounts[account]
        cells = round(summed * _BAR_CELLS / scale) - drawn
        drawn += cells
        bar.append(_GLYPHS[account] * cells, style=_COLOURS[account])
        if accounts[account]:
            legend.append(f"{_GLYPHS[account]} {account} ", style=_COLOURS[account])
    limit = round(budget_bytes * _BAR_CELLS / scale)
    bar.append("·" * max(0, limit - drawn))
    bar.append(f"  {bill.required_bytes / GIB:.2f} GiB needed, budget {budget_bytes / GIB:.2f} GiB")
    return Group(bar, legend)


def _ledger_table(bill: ResourceLedger) -> Table:
    """Returns the bill by phase and account, in GiB; the binding phase is marked."""
    table = Table(title="memory of one GPU, GiB", title_justify="left", box=None, pad_edge=False)
    table.add_column("phase")
    for account in Account:
        table.add_column(account.value.replace("_", " "), justify="right")
    table.add_column("allocated", justify="right")
    peaks = bill.by_phase()
    for phase in Phase:
        moment = max((m for m in Moment if m.phase is phase), key=lambda m: bill.by_moment[m])
        sums = dict.fromkeys(Account, 0)
        for entry in bill.entries:
            if entry.in_allocator and moment in entry.moments:
                sums[entry.account] += entry.bytes
        mark = " <- peak" if phase is bill.binding_phase else ""
        cells = [f"{sums[account] / GIB:.2f}" for account in Account]
        table.add_row(phase.value + mark, *cells, f"{peaks[phase] / GIB:.2f}")
    outside = [entry for entry in bill.entries if not entry.in_allocator]
    for entry in outside:
        blank = [""] * (len(Account) - 1)
        table.add_row(f"+ {entry.name}", *blank, f"{entry.bytes / GIB:.2f}", "")
    return table


def _host_line(bill: ResourceLedger, budget_bytes: int | None) -> Text:
    limit = f" of {format_gib(budget_bytes)}" if budget_bytes is not None else ""
    return Text(
        f"host memory of one node: {format_gib(bill.required_bytes)}{limit}, peak in phase {bill.binding_phase}"
    )


def _trail_table(trail: tuple[TrailStep, ...]) -> Table:
    """Returns the ladder with the best peak of each rung."""
    table = Table(title="ladder", title_justify="left", box=None, pad_edge=False)
    table.add_column("rung", justify="right")
    table.add_column("best configuration there", overflow="fold", ratio=3)
    table.add_column("needs", justify="right", no_wrap=True)
    table.add_column("s/step", justify="right", no_wrap=True)
    table.add_column("finding", overflow="fold", ratio=3)
    for step in trail:
        needs = "" if step.peak_bytes is None else f"{step.peak_bytes / GIB:.2f} GiB"
        seconds = "" if step.step_seconds is None else f"{step.step_seconds:.2f}"
        mark = "-> " if step.verdict is Verdict.CHOSEN else ""
        table.add_row(f"{mark}{step.rung}", step.technique, needs, seconds, f"{step.verdict}: {step.reason}")
    return table


def _clock_table(plan: Plan) -> Table:
    clock = plan.clock
    table = Table(title="time of one optimizer step", title_justify="left", box=None, pad_edge=False)
    for name in ("compute", "memory-bound", "communication", "offload", "all"):
        table.add_column(name, justify="right")
    parts = (
        clock.compute_seconds,
        clock.bandwidth_seconds,
        clock.communication_seconds,
        clock.offload_seconds,
        clock.step_seconds,
    )
    table.add_row(*(format_seconds(part) for part in parts))
    return table


def _relaxation_table(refusal: Infeasible) -> RenderableType:
    if not refusal.relaxations:
        return Text("no change of one input alone makes it fit")
    table = Table(title="one of these changes alone makes it fit", title_justify="left", box=None, pad_edge=False)
    for name in ("change", "from", "to", "what that is"):
        table.add_column(name, overflow="fold")
    for item in refusal.relaxations:
        table.add_row(item.input, item.now, item.needed, item.reason)
    return table
