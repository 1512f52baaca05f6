"""The catalogue priced for one spec: every card times every count, and what an upgrade from the spec's own is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memc.advise.attempt import Attempt, Shortfall, Summary
from memc.advise.desk import Desk, refused
from memc.advise.economics import BreakEven, Costs, Offer, Signal, break_even, signals
from memc.advise.inverse import own_or_other_card
from memc.advise.variations import with_count, without_limit
from memc.errors import MemcError, usage_error
from memc.facts import GpuFacts, gpu_rows
from memc.plan import TrailStep
from memc.solver.trail import trail
from memc.spec_checks import contradictions


@dataclass(frozen=True, kw_only=True)
class Row:
    """One card in one number.

    Attributes:
        card: Catalogue key.
        count: GPUs in a node; there are as many nodes as the spec has.
        capacity_bytes: What torch sees of one.
        usd_per_gpu_hour: Price that money is counted with; None when unknown.
        plan: In short; None when nothing fits.
        shortfall: What stops it; None with a plan.
        break_even: Against the spec's own hardware; None for that itself, without a plan, or when figures are unknown.
    """

    card: str
    count: int
    capacity_bytes: int
    usd_per_gpu_hour: float | None
    plan: Summary | None
    shortfall: Shortfall | None
    break_even: BreakEven | None = None


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Hardware that could not be priced: a card (empty: every card), a count (0: every count), a code and a reason."""

    card: str
    count: int
    code: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What one rung of the spec's own ladder gives and takes.

    Attributes:
        rung: Its number.
        technique: The best set of techniques up to it.
        required_bytes: What each GPU must have then.
        saved_bytes: How much less that is than as asked.
        step_seconds: One optimizer step; None when the card's speed is unknown.
        slowdown: That over the step as asked; None when the card's speed is unknown.
        verdict: What the solver made of it.
    """

    rung: int
    technique: str
    required_bytes: int
    saved_bytes: int
    step_seconds: float | None
    slowdown: float | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The answer of `memc hardware`.

    Attributes:
        card: The spec's own.
        count: Its number.
        own: The plan on it, its time budget set aside; None when nothing fits in memory.
        late: Why the spec's own plan misses its budget of time or money; None when it meets it.
        shortfall: What stops the spec as it is; None when it has a plan.
        rows: What fits first, by money, then by time.
        skipped: What could not be priced.
        optimise: The ladder on the spec's own hardware.
        signals: Whether it is time for other hardware.
    """

    card: str
    count: int
    own: Summary | None
    late: str | None
    shortfall: Shortfall | None
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    optimise: tuple[Saving, ...]
    signals: tuple[Signal, ...]


def survey(desk: Desk, counts: Sequence[int], costs: Costs) -> Survey:
    """Returns every card of the catalogue in every count, priced for the spec.

    Args:
        desk: The spec.
        counts: GPUs in each node; the spec's own count is added, its nodes stay.
        costs: The user's figures.

    Raises:
        MemcError: When the spec contradicts itself or the facts of its own card; ``deadline-without-budget`` when a
            deadline costs something that the spec does not have.
    """
    spec = desk.spec
    limit = spec.time.budget
    deadline = limit.seconds if limit is not None else None
    if costs.deadline and deadline is None:
        raise usage_error(
            "deadline-without-budget",
            "a missed deadline costs money only when the spec has one: time.budget is no duration",
            hint="write time: {budget: 24h} in the spec, or leave --deadline-cost out",
        )
    card, count, nodes = desk.gpu.key, spec.hardware.count, spec.hardware.nodes
    as_is = desk.attempt(own_or_other_card(desk, desk.gpu, usd_per_gpu_hour=costs.gpu_hour.get(card)))
    unlimited = as_is
    if as_is.best is None and limit is not None:
        unlimited = desk.attempt(
            without_limit(own_or_other_card(desk, desk.gpu, usd_per_gpu_hour=costs.gpu_hour.get(card)))
        )
    own, shortfall = unlimited.summary(), as_is.shortfall()
    late = shortfall.sentence if own is not None and shortfall is not None else None
    rows, skipped = _priced(desk, sorted({*counts, count}), costs)
    offers = [
        Offer(
            card=row.card,
            bought=nodes * (row.count if row.card != card else max(0, row.count - count)),
            plan=row.plan,
        )
        for row in rows
        if row.plan is not None and (row.card, row.count) != (card, count)
    ]
    if own is not None:
        gains = {
            (offer.card, offer.plan.config.world_size): break_even(own, offer, costs, deadline) for offer in offers
        }
        rows = [_with_break_even(row, gains.get((row.card, row.count * nodes))) for row in rows]
    best = unlimited.best
    return Survey(
        card=card,
        count=count,
        own=own,
        late=late,
        shortfall=shortfall,
        rows=tuple(sorted(rows, key=_order)),
        skipped=tuple(skipped),
        optimise=_optimise(unlimited),
        signals=signals(
            own,
            best.candidate.price.ledger() if best is not None else None,
            late=late,
            limited=limit is not None,
            costs=costs,
            offers=offers,
        ),
    )


def _priced(desk: Desk, counts: Sequence[int], costs: Costs) -> tuple[list[Row], list[Skipped]]:
    """Returns a row for all hardware that can be priced, and the rest with reasons."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    possible: list[int] = []
    for count in counts:
        wrong = contradictions(with_count(desk.spec, count, desk.spec.hardware.nodes))
        skipped += [Skipped(card="", count=count, code=item.code, reason=item.message) for item in wrong[:1]]
        possible += [] if wrong else [count]
    for listed in gpu_rows():
        facts = desk.card(listed.facts)
        price = costs.gpu_hour.get(listed.key)
        spec = own_or_other_card(desk, facts, usd_per_gpu_hour=price)
        for count in possible:
            try:
                varied = with_count(spec, count, desk.spec.hardware.nodes)
                rows.append(_row(facts, count, desk.attempt(varied, gpu=facts)))
            except MemcError as error:
                # What is unknown of a card, or contradicts it, is so whatever the count.
                reason = refused(error.diagnostics[0]).sentence
                skipped.append(Skipped(card=listed.key, count=0, code=error.diagnostics[0].code, reason=reason))
                break
    return rows, skipped


def _row(gpu: GpuFacts, count: int, attempt: Attempt) -> Row:
    budget = attempt.machine.question.budget
    return Row(
        card=gpu.key,
        count=count,
        capacity_bytes=budget.capacity_bytes,
        usd_per_gpu_hour=budget.usd_per_gpu_hour,
        plan=attempt.summary(),
        shortfall=attempt.shortfall(),
    )


def _with_break_even(row: Row, gain: BreakEven | None) -> Row:
    return replace(row, break_even=gain)


def _order(row: Row) -> tuple[bool, bool, float, float, str, int]:
    """Returns the place of a row: what fits first, what is known before what is not, by money, time, name, count."""
    if row.plan is None:
        return True, False, 0.0, 0.0, row.card, row.count
    money, seconds = row.plan.total_usd, row.plan.total_seconds
    step = math.inf if row.plan.step_seconds is None else row.plan.step_seconds
    return False, money is None, money or 0.0, step if seconds is None else seconds, row.card, row.count


def _optimise(attempt: Attempt) -> tuple[Saving, ...]:
    """Returns what each rung of the ladder saves and costs on the spec's own hardware."""
    machine = attempt.machine
    asked = machine.question.asked
    peak = machine.estimator.price(asked).gpu_required_bytes
    seconds = machine.time(asked).known_step_seconds
    chosen = attempt.best.candidate if attempt.best is not None else None
    steps = trail(machine, chosen)
    return tuple(saving for step in steps if (saving := _saving(step, peak, seconds)) is not None)


def _saving(step: TrailStep, asked_bytes: int, asked_seconds: float | None) -> Saving | None:
    if step.peak_bytes is None:
        return None
    slowdown = None if step.step_seconds is None or asked_seconds is None else step.step_seconds / asked_seconds
    return Saving(
        rung=step.rung,
        technique=step.technique,
        required_bytes=step.peak_bytes,
        saved_bytes=asked_bytes - step.peak_bytes,
        step_seconds=step.step_seconds,
        slowdown=slowdown,
        verdict=step.verdict.value,
    )
