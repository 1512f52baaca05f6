"""What a sound run lacks: memory, or time; each as one diagnostic."""

from __future__ import annotations

from memc.errors import Diagnostic, Location
from memc.units import GIB, format_gib, format_seconds
from memc.verify.attribution import booked_accounts
from memc.verify.conditions import Conditions, process_lines
from memc.verify.lock import Promise
from memc.verify.probe import RankReport
from memc.verify.verdict import judge_rank, whole_run_seconds
from memc.verify.verification import RankVerdict

LOWEST_TARGET_BYTES = GIB


def memory_findings(
    reports: tuple[RankReport, ...], promise: Promise, conditions: Conditions | None = None
) -> tuple[Diagnostic, ...]:
    """Returns one diagnostic when the measured need of any rank is above the budget, for the worst of them.

    Where it would not be without what others held on the card before the run, they are named instead.
    """
    verdicts = [judge_rank(report, promise, conditions) for report in reports]
    over = [verdict for verdict in verdicts if verdict.headroom_bytes is not None and verdict.headroom_bytes < 0]
    if not over:
        return ()
    worst = max(over, key=lambda verdict: (verdict.required_bytes or 0) - verdict.others_bytes)
    required = worst.required_bytes or 0
    if conditions is not None and required - worst.others_bytes <= promise.budget_bytes:
        card = conditions.card_of(next(report for report in reports if report.rank == worst.rank))
        return (_shared_card(worst, promise, () if card is None else process_lines(card)),)
    message = (
        f"rank {worst.rank} needs {format_gib(required)} ({format_gib(worst.peak_reserved_bytes or 0)} reserved, "
        f"{format_gib(worst.outside_allocator_bytes or 0)} outside the allocator), "
        f"{format_gib(required - promise.budget_bytes)} above the budget of {format_gib(promise.budget_bytes)}; "
        f"it peaks in {worst.peak_phase}. {largest_account(worst.peak_phase, promise)}"
    )
    return (
        Diagnostic(
            code="measured-peak-over-budget",
            message=message,
            where=Location(file=str(promise.path), field="budget.gpu_bytes"),
            context=tuple(
                f"{phase.phase:<10} {format_gib(phase.allocated_bytes):>10} allocated, "
                f"ledger {format_gib(phase.ledger_bytes) if phase.ledger_bytes is not None else 'has no such phase'}"
                for phase in worst.phases
            ),
            hint=lower_target(required, promise),
        ),
    )


def _shared_card(worst: RankVerdict, promise: Promise, processes: tuple[str, ...]) -> Diagnostic:
    required = worst.required_bytes or 0
    return Diagnostic(
        code="card-shared",
        message=f"rank {worst.rank} needs {format_gib(required - worst.others_bytes)} itself, within the budget of "
        f"{format_gib(promise.budget_bytes)}; with the {format_gib(worst.others_bytes)} that others held on the card "
        f"before the run it is {format_gib(required)}",
        where=Location(file=str(promise.path), field="budget.gpu_bytes"),
        context=processes,
        hint="end what else uses the card and verify again; where it stays, set memory.target to what it leaves",
    )


def time_findings(step_seconds: float | None, promise: Promise) -> tuple[Diagnostic, ...]:
    """Returns one diagnostic when the whole run, at the measured pace, takes longer than the spec allows."""
    total = whole_run_seconds(step_seconds, promise)
    if total is None or step_seconds is None or promise.budget_seconds is None or total <= promise.budget_seconds:
        return ()
    clock = f", the clock said {format_seconds(promise.step_seconds)}" if promise.step_seconds else ""
    return (
        Diagnostic(
            code="measured-time-over-budget",
            message=f"a step takes {format_seconds(step_seconds)}{clock}: {promise.total_steps} of them make the run "
            f"{format_seconds(total)}, {format_seconds(total - promise.budget_seconds)} above the budget of "
            f"{format_seconds(promise.budget_seconds)}",
            where=Location(file=str(promise.path), field="budget.seconds"),
            hint="raise time.budget, train on less data or for fewer epochs, or take a faster card: "
            "memc hardware lists them",
        ),
    )


def largest_account(probed_phase: str, promise: Promise) -> str:
    """Returns a sentence that names the account which the ledger books largest where the run peaked.

    A probed phase spans several moments of the ledger; the fullest of them is meant. Without a phase, of all.
    """
    bill = booked_accounts(promise, probed_phase)
    if not bill:
        return "The ledger books nothing there."
    account = max(bill, key=lambda name: bill[name])
    return f"The largest account there is {account}: the ledger books {format_gib(bill[account])} for it."


def lower_target(measured_bytes: int, promise: Promise) -> str:
    """Returns the edit of the spec that makes a plan leave room for what the ledger missed."""
    missed = max(measured_bytes - promise.required_bytes, measured_bytes - promise.budget_bytes)
    target = promise.budget_bytes - missed
    if target < LOWEST_TARGET_BYTES:
        return "close other programs that use this GPU (nvidia-smi lists them), then verify again"
    shown = int(target / GIB * 10) / 10
    return (
        f"close other programs on this GPU (nvidia-smi lists them) and verify again, or set memory.target to "
        f"{shown}GiB in the spec and compile again: that leaves room for the {format_gib(missed)} the ledger missed"
    )
