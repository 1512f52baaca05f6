"""The next rung against one account: the plan with one technique more, priced by the same ledger and clock."""

from __future__ import annotations

from dataclasses import dataclass

from memc.ladder import Technique
from memc.ledger.entries import Account
from memc.plan import Infeasible, Plan
from memc.solver.frames import Candidate
from memc.solver.solve import machine_for
from memc.spec import LoadedSpec


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What one technique more would change.

    Attributes:
        technique: Its name.
        rung: Its rung on this hardware.
        replaces: The technique of the plan that it takes the place of; empty when none.
        boundary: Where it stops paying.
        account_saved_bytes: What it takes off the account, at the account's own largest moment.
        peak_before_bytes, peak_bytes: Required bytes of one GPU without and with it.
        step_seconds_before, step_seconds: Time of one optimizer step without and with it.
    """

    technique: str
    rung: int
    replaces: str
    boundary: str
    account_saved_bytes: int
    peak_before_bytes: int
    peak_bytes: int
    step_seconds_before: float
    step_seconds: float


def next_cuts(
    loaded: LoadedSpec, result: Plan | Infeasible, samples: int | None, account: Account | None
) -> tuple[Cut, ...]:
    """Returns the techniques that would lower both the peak and `account` of a plan, lowest rung first.

    Each differs from the plan in one dimension of the ladder. With no account, lowering the peak is enough. A refusal
    has none: the configuration that comes nearest has used what there is.
    """
    if isinstance(result, Infeasible):
        return ()
    machine = machine_for(loaded, result.model, result.gpu, samples)
    chosen = _by_dimension(machine.space().candidates(), result.config)
    if chosen is None:
        return ()
    here, candidates = chosen
    before = machine.time(here.config).step_seconds
    cuts = []
    for candidate in candidates:
        pair = _one_step(here, candidate)
        if pair is None or candidate.price.gpu_required_bytes >= here.price.gpu_required_bytes:
            continue
        added, replaced = pair
        saved = 0 if account is None else _largest(here, account) - _largest(candidate, account)
        if account is not None and saved <= 0:
            continue
        cuts.append(
            Cut(
                technique=added.name,
                rung=machine.rungs[added.name],
                replaces=replaced,
                boundary=added.boundary,
                account_saved_bytes=saved,
                peak_before_bytes=here.price.gpu_required_bytes,
                peak_bytes=candidate.price.gpu_required_bytes,
                step_seconds_before=before,
                step_seconds=machine.time(candidate.config).step_seconds,
            )
        )
    return tuple(sorted(cuts, key=lambda cut: (cut.rung, cut.step_seconds, cut.peak_bytes)))


def _by_dimension(candidates: list[Candidate], config: object) -> tuple[Candidate, list[Candidate]] | None:
    here = next((candidate for candidate in candidates if candidate.config == config), None)
    return None if here is None else (here, candidates)


def _one_step(here: Candidate, other: Candidate) -> tuple[Technique, str] | None:
    """Returns the technique that `other` has more, and what it replaces; None when more than one dimension differs."""
    mine = {technique.dimension: technique for technique in here.techniques}
    theirs = {technique.dimension: technique for technique in other.techniques}
    changed = [dimension for dimension in {*mine, *theirs} if mine.get(dimension) != theirs.get(dimension)]
    if len(changed) != 1 or changed[0] not in theirs:
        return None
    replaced = mine.get(changed[0])
    return theirs[changed[0]], replaced.name if replaced is not None else ""


def _largest(candidate: Candidate, account: Account) -> int:
    """Returns the account's bytes on the GPU at its own largest moment."""
    gpu = candidate.price.ledger().gpu
    return max(gpu.by_account(moment)[account] for moment in gpu.by_moment)
