"""The next rungs after a run that needed more than its card has, priced by the plan's own ledger and clock."""

from __future__ import annotations

from pathlib import Path

from memc import driver
from memc.errors import MemcError
from memc.ledger.entries import Account
from memc.plan import Infeasible
from memc.solver.cuts import Cut, next_cuts
from memc.units import format_gib, format_seconds
from memc.verify.attribution import overshooting
from memc.verify.lock import read_lock
from memc.verify.verification import RankVerdict, Verification

_SHOWN = 3


def next_rungs(folder: Path, outcome: Verification) -> tuple[Cut, ...]:
    """Returns the techniques that would lower the peak of a run that had too little memory, lowest rung first.

    Where a snapshot tells which account is above the ledger, those that cut it. None for any other outcome, or when
    the folder's spec is gone.
    """
    if not outcome.over_memory:
        return ()
    try:
        answer = driver.answer(driver.spec_path_of(folder), folder=folder)
    except MemcError:
        return ()
    if isinstance(answer.result, Infeasible):
        return ()
    samples = driver.count_samples(answer.loaded)
    account = _account(folder, outcome)
    found = () if account is None else next_cuts(answer.loaded, answer.result, samples, account)
    return found or next_cuts(answer.loaded, answer.result, samples, None)


def rung_lines(cuts: tuple[Cut, ...]) -> list[str]:
    """Returns the rungs as text: what each is instead of, the peak it leads to and what it costs."""
    lines = []
    for cut in cuts[:_SHOWN]:
        instead = f" instead of {cut.replaces}" if cut.replaces else ""
        times = f", {format_seconds(cut.step_seconds_before)} -> {format_seconds(cut.step_seconds)} per step"
        peak = f"{format_gib(cut.peak_before_bytes)} -> {format_gib(cut.peak_bytes)}"
        lines.append(f"next: rung {cut.rung}, {cut.technique}{instead}: peak {peak}{times}")
    return lines


def _account(folder: Path, outcome: Verification) -> Account | None:
    """Returns the account that a snapshot shows above the ledger on the rank that needed most; None when none does."""
    ranks = [rank for rank in outcome.ranks if rank.rank in outcome.attributions]
    if not ranks:
        return None
    worst = max(ranks, key=_need)
    account = overshooting(outcome.attributions[worst.rank], read_lock(folder), worst.peak_phase)
    return None if account in (None, Account.WORKSPACE) else Account(account)


def _need(rank: RankVerdict) -> int:
    return rank.required_bytes or 0
