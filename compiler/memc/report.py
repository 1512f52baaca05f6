"""What a person looks at in a terminal: verdict first, then the bill by phase and account, the ladder, the clock."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from memc.facts.calibration import calibration_lines
from memc.ledger.entries import Account, Grade, Moment, Phase, ResourceLedger, allocated_by_account
from memc.plan import Infeasible, Plan, TrailStep, Verdict
from memc.units import GIB, format_gib, format_seconds
from memc.verdict import describe, plan_verdict, refusal_verdict

__all__ = ["describe", "plan_report", "plan_verdict", "refusal_report"]

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
_ASCII_GLYPHS = dict(zip(Account, "#%=-+:", strict=True))
_SHORT = dict(zip(Account, ("params", "master", "grads", "states", "activ.", "work"), strict=True))
_WIDE = 100
_QUANTITY = re.compile(r"(?<=\d) (?=(?:[KMG]iB|s|min|h|days|tokens|steps)\b)|(?<=\d) (?=x \S)|(?<=\d x) (?=\S)")


def plan_report(plan: Plan) -> RenderableType:
    """Returns the report of a plan."""
    parts: list[RenderableType] = [_Sentence(line) for line in plan_verdict(plan)]
    parts += [_Sentence(f"WHY: {reason}") for reason in plan.reasons]
    parts += [Text(""), _Bar(plan.ledger.gpu, plan.budget.gpu_bytes), Text(""), _Bill(plan.ledger.gpu)]
    parts += [_host_line(plan.ledger.host, plan.budget.host_bytes), Text("")]
    parts += [_trail_table(plan.trail), Text("")]
    parts += [_clock_table(plan)] if not plan.clock.unknown else []
    parts += [_Sentence(f"measured: {line}") for line in calibration_lines(plan.gpu)]
    parts += [_Sentence(f"note: {warning}") for warning in (*plan.warnings, *plan.clock.assumptions)]
    return Group(*parts)


def refusal_report(refusal: Infeasible) -> RenderableType:
    """Returns the report of a refusal."""
    parts: list[RenderableType] = [_Sentence(line) for line in refusal_verdict(refusal)]
    parts += [Text(""), _Bar(refusal.closest_ledger.gpu, refusal.budget.gpu_bytes), Text("")]
    parts += [_Bill(refusal.closest_ledger.gpu)]
    parts += [_host_line(refusal.closest_ledger.host, refusal.budget.host_bytes), Text("")]
    parts += [_trail_table(refusal.trail), Text(""), _relaxation_table(refusal)]
    parts += [_Sentence(f"measured: {line}") for line in calibration_lines(refusal.gpu)]
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _Sentence:
    """One line of text that breaks between words, never between a number and its unit."""

    text: str
    hang: str = "  "

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        kept = _QUANTITY.sub("\u00a0", self.text)
        lines = textwrap.wrap(kept, options.max_width, subsequent_indent=self.hang, break_on_hyphens=False)
        for line in lines or [""]:
            yield Text(line.replace("\u00a0", " "), no_wrap=True, overflow="fold")


@dataclass(frozen=True, slots=True)
class _Bar:
    """A stacked bar of the binding phase, scaled to the larger of need and budget; ASCII where nothing else shows."""

    bill: ResourceLedger
    budget_bytes: int

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        need, budget = self.bill.required_bytes, self.budget_bytes
        accounts = self.bill.by_account()
        accounts[Account.WORKSPACE] += need - sum(accounts.values())
        glyphs, free = (_ASCII_GLYPHS, ".") if options.ascii_only else (_GLYPHS, "·")
        cells = max(8, min(_BAR_CELLS, options.max_width - 4))
        scale = max(need, budget)
        bar, drawn, summed = Text("  "), 0, 0
        for account in Account:
            summed += accounts[account]
            width = round(summed * cells / scale) - drawn
            drawn += width
            bar.append(glyphs[account] * width, style=_COLOURS[account])
        bar.append(free * max(0, round(budget * cells / scale) - drawn))
        yield bar
        yield _Sentence(f"  {format_gib(need)} needed, budget {format_gib(budget)}")
        legend = Text("  ")
        for account in Account:
            if accounts[account]:
                word = Text(f"{glyphs[account]}\u00a0{account}", style=_COLOURS[account])
                if len(legend) > 2 and len(legend) + len(word) > options.max_width:
                    yield _plain_spaces(legend)
                    legend = Text("  ")
                legend.append_text(word).append(" ")
        yield _plain_spaces(legend)


def _plain_spaces(text: Text) -> Text:
    """Returns a text whose unbreakable spaces are plain ones, and which is left on one line."""
    text.plain = text.plain.replace("\u00a0", " ").rstrip()
    text.no_wrap = True
    return text


@dataclass(frozen=True, slots=True)
class _Bill:
    """The bill by phase and account, in GiB; the binding phase is marked. Accounts that hold nothing are left out."""

    bill: ResourceLedger

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        bill, narrow = self.bill, options.max_width < _WIDE
        booked = {entry.account for entry in bill.entries if entry.in_allocator}
        accounts = [account for account in Account if account in booked]
        known = "" if bill.grade is Grade.ESTIMATED else f", {bill.grade}"
        table = Table(title=f"memory of one GPU, GiB{known}", title_justify="left", box=None, pad_edge=False)
        table.padding = (0, 1, 0, 0) if narrow else (0, 2, 0, 0)
        table.add_column("phase", no_wrap=True, overflow="fold")
        for account in accounts:
            name = _SHORT[account] if narrow else account.value.replace("_", " ")
            table.add_column(name, justify="right", no_wrap=True, overflow="fold")
        table.add_column("all" if narrow else "allocated", justify="right", no_wrap=True, overflow="fold")
        peaks = bill.by_phase()
        for phase in Phase:
            sums = allocated_by_account(bill, phase)
            mark = (" <-" if narrow else " <- peak") if phase is bill.binding_phase else ""
            cells = [f"{sums[account] / GIB:.2f}" for account in accounts]
            table.add_row(phase.value + mark, *cells, f"{peaks[phase] / GIB:.2f}")
        yield table
        beyond = [entry for entry in bill.entries if not entry.in_allocator]
        always = [entry for entry in beyond if all(entry.counts_at(moment) for moment in Moment)]
        if always:
            listed = ", ".join(f"{format_gib(entry.bytes)} {entry.name}" for entry in always)
            yield _Sentence(f"and in every phase, beyond what is allocated: {listed}")
        at_times: dict[str, list[str]] = {}
        for entry in beyond:
            if entry not in always:
                phases = ", ".join(dict.fromkeys(moment.phase.value for moment in Moment if moment in entry.moments))
                at_times.setdefault(phases, []).append(f"{format_gib(entry.bytes)} {entry.name}")
        for phases, names in at_times.items():
            yield _Sentence(f"and in {phases}: {', '.join(names)}")


def _host_line(bill: ResourceLedger, budget_bytes: int | None) -> _Sentence:
    """Returns what a node's memory holds; what only resuming takes is said apart, since it does not decide a fit."""
    limit = f" of {format_gib(budget_bytes)}" if budget_bytes is not None else ""
    peaks = bill.by_phase()
    resuming = peaks.pop(Phase.RESUME, 0)
    phase = max(peaks, key=lambda name: peaks[name])
    more = f"; resuming takes {format_gib(resuming)}" if resuming > peaks[phase] else ""
    return _Sentence(f"host memory of one node: {format_gib(peaks[phase])}{limit}, peak in phase {phase}{more}")


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
        table.add_row(
            f"{mark}{step.rung}", step.technique, needs, seconds, _Sentence(f"{step.verdict}: {step.reason}", hang="")
        )
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
