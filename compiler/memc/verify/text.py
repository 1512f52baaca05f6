"""A verification as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from memc.units import format_gib, format_seconds
from memc.verify.accounts import AccountComparison
from memc.verify.attribution import Attribution
from memc.verify.verification import PhaseComparison, RankVerdict, Verification

_STOPPED = ("out-of-memory", "rank-failed", "launcher-failed", "verification-timed-out", "rank-report-missing")
"""Findings of a run that did not come to its end: what it held by then says nothing of what it needs."""


def text_lines(verification: Verification) -> list[str]:
    """Returns the outcome as lines for people: the verdict first, then each rank, then what is wrong."""
    lines = [_headline(verification), *_against_the_lock(verification), *_of_the_machine(verification)]
    for rank in verification.ranks:
        lines += ["", *_rank_lines(rank, verification.attributions.get(rank.rank))]
    for diagnostic in verification.diagnostics:
        lines += ["", *str(diagnostic).splitlines()]
    return lines


def _headline(outcome: Verification) -> str:
    run = f"{outcome.steps} steps on {outcome.world_size} × {_device_names(outcome)}"
    if outcome.required_bytes is not None and outcome.headroom_bytes is not None:
        budget, need = format_gib(outcome.budget_bytes), format_gib(outcome.required_bytes)
        if any(finding.code in _STOPPED for finding in outcome.diagnostics):
            return f"stopped: with {need} in use, of a budget of {budget} ({run})"
        if outcome.fits:
            return f"fits: {need} of {budget}, headroom {format_gib(outcome.headroom_bytes)} ({run})"
        return f"does not fit: {need}, {format_gib(-outcome.headroom_bytes)} above the budget of {budget} ({run})"
    if outcome.passed:
        return f"trains: {run}; memory was not judged, since that needs the GPU"
    return f"failed: {run}"


def _device_names(outcome: Verification) -> str:
    names = sorted({rank.device_name for rank in outcome.ranks if rank.device_name})
    return " and ".join(names) or outcome.device.upper()


def _against_the_lock(outcome: Verification) -> Iterator[str]:
    if outcome.difference_bytes is not None:
        inside = "inside" if outcome.within_interval else "outside"
        yield (
            f"ledger: promised {format_gib(outcome.ledger_required_bytes)} ± {format_gib(outcome.uncertainty_bytes)}; "
            f"{outcome.grade} {_signed(outcome.difference_bytes)} from it, {inside} the interval"
        )
    if outcome.step_seconds is not None:
        line = f"step: {format_seconds(outcome.step_seconds)}"
        if outcome.clock_step_seconds and outcome.step_time_matches is not None:
            off = outcome.step_seconds / outcome.clock_step_seconds - 1
            agrees = "as the clock said" if outcome.step_time_matches else "not what the clock said"
            line += f", {agrees}: {format_seconds(outcome.clock_step_seconds)} ({off:+.0%})"
        yield line
    if outcome.run_seconds is not None:
        line = f"run: {format_seconds(outcome.run_seconds)} for {outcome.total_steps} steps at this pace"
        if outcome.budget_seconds is not None:
            within = "within" if outcome.time_holds else "above"
            line += f", {within} the budget of {format_seconds(outcome.budget_seconds)}"
        yield line


def _of_the_machine(outcome: Verification) -> Iterator[str]:
    if outcome.host_resident_bytes is not None and outcome.host_ledger_bytes is not None:
        yield (
            f"host: {format_gib(outcome.host_resident_bytes)} resident in {len(outcome.ranks)} "
            f"process{'es' if len(outcome.ranks) > 1 else ''} at their peaks, shared pages in each; ledger "
            f"{format_gib(outcome.host_ledger_bytes)}"
        )
    if 0 < len(outcome.ranks) < outcome.world_size and outcome.grade == "measured":
        yield f"ranks: {outcome.ranks_in_lock} of {outcome.world_size} are measured; each node answers for its own"
    yield from (f"note: {sentence}" for sentence in outcome.notes)


def _rank_lines(rank: RankVerdict, found: Attribution | None) -> Iterator[str]:
    title = f"rank {rank.rank}"
    if rank.required_bytes is not None and rank.headroom_bytes is not None:
        title += (
            f": {format_gib(rank.peak_reserved_bytes or 0)} reserved + "
            f"{format_gib(rank.outside_allocator_bytes or 0)} outside = {format_gib(rank.required_bytes)}, "
            f"headroom {format_gib(rank.headroom_bytes)}"
        )
    yield title
    for phase in rank.phases:
        yield _phase_line(phase)
    yield from (_account_line(account) for account in rank.accounts)
    if found is not None:
        parts = ", ".join(f"{name} {format_gib(size)}" for name, size in found.accounts.items() if size)
        yield f"  at its {found.moment}, by its snapshot: {parts}"
    details = []
    if rank.first_loss is not None and rank.last_loss is not None:
        details.append(f"loss {rank.first_loss:.4g} → {rank.last_loss:.4g}")
    if rank.tokens_per_second is not None:
        details.append(f"{rank.tokens_per_second:,.0f} tokens/s")
    if rank.host_rss_peak_bytes is not None:
        pinned = f", {format_gib(rank.host_pinned_peak_bytes)} pinned" if rank.host_pinned_peak_bytes else ""
        details.append(f"host memory {format_gib(rank.host_rss_peak_bytes)}{pinned}")
    if details:
        yield "  " + ", ".join(details)


def _account_line(account: AccountComparison) -> str:
    line = f"  holds {account.account} {format_gib(account.held_bytes)} on the {account.place}: "
    if account.agrees:
        return line + "as the ledger says"
    booked = f"{format_gib(account.ledger_bytes)} ({', '.join(account.entries) or 'no entry'})"
    return line + f"the ledger books {booked}, {_signed(account.difference_bytes)} from it"


def _phase_line(phase: PhaseComparison) -> str:
    line = (
        f"  {phase.phase:<12}  allocated {format_gib(phase.allocated_bytes):>10}"
        f"  reserved {format_gib(phase.reserved_bytes):>10}"
    )
    if phase.ledger_bytes is not None and phase.difference_bytes is not None:
        line += f"  ledger {format_gib(phase.ledger_bytes):>10}  difference {_signed(phase.difference_bytes):>11}"
    return line


def _signed(size_bytes: int) -> str:
    return ("−" if size_bytes < 0 else "+") + format_gib(abs(size_bytes))
