"""`memc verify --escalate`: measure, keep free what the ledger missed, solve again, until a measured plan fits."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memc import driver
from memc.certify.room import Room
from memc.driver import LOCK_NAME, Answer
from memc.plan import Infeasible, Plan
from memc.spec import LoadedSpec, load_spec
from memc.units import format_gib
from memc.verify import Verification
from memc.verify.findings import unwritable
from memc.verify.lock import Promise, read_lock, require_unedited

MOST_ATTEMPTS = 6

Verify = Callable[[Path], Verification]
"""Runs a folder and judges it."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One plan that was measured.

    Attributes:
        techniques: What it switches on; empty: as asked.
        rung: Its highest rung.
        promised_bytes: What its ledger says one GPU needs.
        measured_bytes: What the worst rank needed, or had when it ran out.
        fits: Whether it passed.
        grade: ``measured`` on a card, ``rehearsed`` on one that does not exist.
        over_memory: Whether want of memory is all that kept it from passing.
    """

    techniques: tuple[str, ...]
    rung: int
    promised_bytes: int
    measured_bytes: int | None
    fits: bool
    grade: str
    over_memory: bool


@dataclass(frozen=True, kw_only=True)
class Climb:
    """How a climb ended.

    Attributes:
        outcome: The last verification.
        attempts: Every plan that was measured, in order.
        written: Whether the folder now holds another plan than before.
        stopped: Why it ended without a plan that fits; empty when it did not.
    """

    outcome: Verification
    attempts: tuple[Attempt, ...]
    written: bool = False
    stopped: str = ""

    def document(self) -> dict[str, Any]:
        """Returns what ``--json`` adds to the last verification."""
        attempts = [
            {
                "techniques": list(one.techniques),
                "rung": one.rung,
                "promised_bytes": one.promised_bytes,
                "measured_bytes": one.measured_bytes,
                "fits": one.fits,
                "grade": one.grade,
                "over_memory": one.over_memory,
            }
            for one in self.attempts
        ]
        return {"attempts": attempts, "written": self.written, "stopped": self.stopped}


def climb(folder: Path, run: Verify, on_step: Callable[[str], None]) -> Climb:
    """Verifies a folder and, where its plan does not fit the card, the next plans of its spec until one does.

    What the measurement was above the ledger is kept free of the spec's budget, and the spec solved again with that,
    so that nothing is done that the spec does not allow. The folder is written once, after a plan passed; its lock
    keeps the room, so that later compiles of the same spec yield the same plan.

    Args:
        folder: What `memc compile` wrote.
        run: Verifies a folder.
        on_step: Called with a sentence before each further attempt.

    Raises:
        MemcError: As verifying; exit 4 when a file was edited meanwhile.
    """
    promise = read_lock(folder)
    require_unedited(folder, promise)
    loaded = load_spec(driver.spec_path_of(folder))
    answer = driver.answer_of(loaded, folder=folder)
    if isinstance(answer.result, Infeasible):
        return Climb(outcome=run(folder), attempts=(), stopped="the spec has no plan any more: memc explain says why")
    above = folder.resolve().parent
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=above, prefix=".memc-escalate-"))
        except OSError as error:
            raise unwritable(above, error) from error
        return _climb(folder, promise, loaded, answer, Path(scratch), run, on_step)


def _climb(
    folder: Path,
    promise: Promise,
    loaded: LoadedSpec,
    answer: Answer,
    scratch: Path,
    run: Verify,
    on_step: Callable[[str], None],
) -> Climb:
    """Returns how a climb ended whose plans are written below `scratch`, the one that passes into `folder`."""
    plan = answer.result
    assert isinstance(plan, Plan)
    outcome, place = run(folder), folder
    attempts = [_attempt(plan, promise, outcome)]
    room_bytes = 0 if answer.room is None else answer.room.bytes
    while outcome.over_memory and len(attempts) < MOST_ATTEMPTS:
        room = _room(attempts[-1], promise, loaded.spec.digest(), room_bytes, answer)
        answer, room_bytes = driver.answer_of(loaded, folder=folder, room=room), room.bytes
        if isinstance(answer.result, Infeasible):
            return _stopped(outcome, attempts, answer.result)
        plan, place = answer.result, scratch / f"plan{len(attempts)}"
        files = driver.generate(answer, folder, driver.compile_command(loaded.path, folder))
        driver.write({place: files})
        promise = read_lock(place)
        on_step(f"escalating: {room.reason}; now {_named(plan)}, {format_gib(promise.required_bytes)} promised")
        outcome = run(place)
        attempts.append(_attempt(plan, promise, outcome))
    if place != folder and outcome.passed:
        files[LOCK_NAME] = (place / LOCK_NAME).read_text(encoding="utf-8")
        driver.write({folder: files}, keep=[loaded.path])
        return Climb(outcome=outcome, attempts=tuple(attempts), written=True)
    stopped = f"{len(attempts)} plans were measured, and none fits" if outcome.over_memory else ""
    return Climb(outcome=outcome, attempts=tuple(attempts), stopped=stopped)


def _attempt(plan: Plan, promise: Promise, outcome: Verification) -> Attempt:
    return Attempt(
        techniques=plan.techniques,
        rung=plan.rung,
        promised_bytes=promise.required_bytes,
        measured_bytes=_measured(outcome),
        fits=outcome.passed,
        grade=outcome.grade,
        over_memory=outcome.over_memory,
    )


def _measured(outcome: Verification) -> int | None:
    """Returns what the worst rank needed; of one that ran out of memory, at least all that its card had."""
    needs = [rank.required_bytes for rank in outcome.ranks if rank.required_bytes is not None]
    short = [rank.capacity_bytes for rank in outcome.ranks if rank.ran_out and rank.capacity_bytes is not None]
    return max((*needs, *short), default=None)


def _room(last: Attempt, promise: Promise, spec_digest: str, kept_bytes: int, answer: Answer) -> Room:
    """Returns what to keep free: what the ledger missed, and enough that the next plan needs less than the last."""
    measured = promise.budget_bytes if last.measured_bytes is None else last.measured_bytes
    missed = measured - last.promised_bytes
    smaller = promise.budget_bytes - last.promised_bytes + 1
    size = max(missed, smaller, kept_bytes + 1)
    plan = answer.result
    assert isinstance(plan, Plan)
    reason = (
        f"{last.grade}, {_named(plan)} needs {format_gib(measured)} of {format_gib(promise.budget_bytes)} where the "
        f"ledger says {format_gib(last.promised_bytes)}: {format_gib(size)} are kept free"
    )
    return Room(bytes=size, reason=reason, spec_digest=spec_digest)


def _named(plan: Plan) -> str:
    return ", ".join(plan.techniques) or "the plan as asked"


def _stopped(outcome: Verification, attempts: list[Attempt], refusal: Infeasible) -> Climb:
    words = [f"{item.input} {item.now} -> {item.needed}" for item in refusal.relaxations if item.needed]
    change = f"; a change of the spec that would do: {words[0]}" if words else ""
    return Climb(
        outcome=outcome,
        attempts=tuple(attempts),
        stopped=f"the spec allows nothing that would fit with what is to be kept free by now{change}",
    )
