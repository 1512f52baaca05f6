"""What a page shows: rows of display text for its tables, numbers for its charts."""

from __future__ import annotations

from typing import Any

from memc.clock.steptime import StepTime
from memc.ledger.entries import Account, Ledger, Phase, ResourceLedger, allocated_by_account
from memc.plan import Budget, Infeasible, Plan, TrailStep, Verdict
from memc.units import GIB, format_gib, format_seconds
from memc.verdict import plan_verdict, refusal_verdict

_OUTSIDE = "beyond_allocated"


def content(answer: Plan | Infeasible) -> dict[str, Any]:
    """Returns the values that the page's template takes, without its scripts."""
    if isinstance(answer, Plan):
        ledger, clock, lines, warnings = answer.ledger, answer.clock, plan_verdict(answer), answer.warnings
    else:
        ledger, clock, lines = answer.closest_ledger, answer.closest_clock, refusal_verdict(answer)
        warnings = ()
    relaxations = () if isinstance(answer, Plan) else answer.relaxations
    return {
        "title": answer.name,
        "model": answer.model.key,
        "feasible": isinstance(answer, Plan),
        "verdict": [_headed(line.strip()) for line in lines],
        "warnings": [*warnings, *clock.assumptions],
        "relaxations": [(item.input, item.now, item.needed, item.reason) for item in relaxations],
        "accounts": [_label(account.value) for account in _used(ledger.gpu)] + [_label(_OUTSIDE)],
        "phases": _phase_rows(ledger.gpu, answer.budget),
        "peak": ledger.gpu.binding_phase.value,
        "budget": format_gib(answer.budget.gpu_bytes),
        "host": _host_rows(ledger.host, answer.budget),
        "trail": [_trail_row(step) for step in answer.trail],
        "clock": _clock_rows(clock),
        "entries": _entry_rows(ledger),
        "charts": _charts(ledger, clock, answer.budget, answer.trail),
    }


def _headed(line: str) -> tuple[str, str]:
    """Returns the capital words that a line opens with, and the rest of it."""
    head, _, rest = line.partition(": ")
    return (f"{head}:", rest) if head.isupper() else ("", line)


def _used(bill: ResourceLedger) -> list[Account]:
    booked = {entry.account for entry in bill.entries}
    return [account for account in Account if account in booked]


def _label(name: str) -> str:
    return name.replace("_", " ")


def _beyond(bill: ResourceLedger) -> int:
    return bill.reserved_above_allocated_bytes + bill.outside_allocator_bytes


def _phase_rows(bill: ResourceLedger, budget: Budget) -> list[dict[str, Any]]:
    """Returns one row per phase: GiB by account, beyond what is allocated, and all of it against the budget."""
    rows, peaks = [], bill.by_phase()
    for phase in Phase:
        sums, beyond = allocated_by_account(bill, phase), _beyond(bill)
        needed = peaks[phase] + beyond
        cells = [f"{sums[account] / GIB:.2f}" for account in _used(bill)]
        rows.append(
            {
                "phase": phase.value,
                "peak": phase is bill.binding_phase,
                "cells": [*cells, f"{beyond / GIB:.2f}"],
                "needed": f"{needed / GIB:.2f}",
                "over": needed > budget.gpu_bytes,
            }
        )
    return rows


def _host_rows(bill: ResourceLedger, budget: Budget) -> list[tuple[str, str]]:
    """Returns (name, size) of host memory at its peak, and the limit."""
    rows = [(_label(account.value), format_gib(size)) for account, size in bill.by_account().items() if size]
    limit = "not given" if budget.host_bytes is None else format_gib(budget.host_bytes)
    peak = f"needed, in phase {bill.binding_phase.value}"
    return [*rows, (peak, format_gib(bill.required_bytes)), ("hardware.host_memory", limit)]


def _trail_row(step: TrailStep) -> dict[str, Any]:
    return {
        "rung": step.rung,
        "chosen": step.verdict is Verdict.CHOSEN,
        "technique": step.technique,
        "needs": "" if step.peak_bytes is None else format_gib(step.peak_bytes),
        "short": "" if not step.shortfall_bytes else format_gib(step.shortfall_bytes),
        "seconds": "" if step.step_seconds is None else format_seconds(step.step_seconds),
        "finding": _label(step.verdict.value),
        "reason": step.reason + (f" ({step.fidelity})" if step.fidelity else ""),
    }


def _time_parts(clock: StepTime) -> list[tuple[str, float]]:
    """Returns the parts of a step's time; none where the card is not timed."""
    if clock.unknown:
        return []
    return [
        ("compute", clock.compute_seconds),
        ("memory-bound", clock.bandwidth_seconds),
        ("communication", clock.communication_seconds),
        ("offload", clock.offload_seconds),
    ]


def _clock_rows(clock: StepTime) -> list[tuple[str, str, str]]:
    """Returns (part, time, share) of one optimizer step."""
    whole = clock.step_seconds
    if clock.unknown:
        return [("one optimizer step", "unknown", "")]
    rows = [(name, format_seconds(part), f"{part / whole:.0%}") for name, part in _time_parts(clock)]
    return [*rows, ("one optimizer step", format_seconds(whole), "100%")]


def _entry_rows(ledger: Ledger) -> list[tuple[str, str, str, str, str, str, str]]:
    """Returns (resource, account, entry, bytes, phases, formula, source) of every entry."""
    rows = []
    for bill in (ledger.gpu, ledger.host, ledger.nvme):
        for entry in bill.entries:
            alive = {moment.phase for moment in entry.moments}
            phases = "every phase" if len(alive) == len(Phase) else ", ".join(p.value for p in Phase if p in alive)
            rows.append(
                (
                    bill.resource.value,
                    _label(entry.account.value),
                    entry.name,
                    f"{entry.bytes:,}",
                    phases,
                    entry.formula,
                    entry.source,
                )
            )
    return rows


def _charts(ledger: Ledger, clock: StepTime, budget: Budget, trail: tuple[TrailStep, ...]) -> dict[str, Any]:
    """Returns the numbers of the charts: bytes and seconds."""
    bill = ledger.gpu
    by_phase = {phase: allocated_by_account(bill, phase) for phase in Phase}
    return {
        "phases": [phase.value for phase in Phase],
        "peak": bill.binding_phase.value,
        "by_account": {a.value: [by_phase[phase][a] for phase in Phase] for a in _used(bill)},
        "beyond": _beyond(bill),
        "required": bill.required_bytes,
        "budget": budget.gpu_bytes,
        "host": {account.value: size for account, size in ledger.host.by_account().items() if size},
        "host_limit": budget.host_bytes,
        "trail": [
            {
                "rung": step.rung,
                "peak": step.peak_bytes,
                "chosen": step.verdict is Verdict.CHOSEN,
                "name": step.technique,
            }
            for step in trail
        ],
        "time": dict(_time_parts(clock)),
        "step_seconds": clock.known_step_seconds,
    }
