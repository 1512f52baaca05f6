"""The trail: every rung of the ladder with its best peak, its shortfall, and why it was passed over or not needed."""

from __future__ import annotations

from memc.ladder import LADDER, Technique
from memc.plan import TrailStep, Verdict
from memc.solver.frames import Candidate
from memc.solver.search import Machine
from memc.solver.timed import fitting_by_time
from memc.units import format_gib, format_seconds

AS_ASKED = "as asked"
_LISTED = 4


def trail(machine: Machine, chosen: Candidate | None) -> tuple[TrailStep, ...]:
    """Returns one step per rung, lowest first.

    Args:
        machine: The priced question.
        chosen: The plan; None when nothing fits.
    """
    return tuple(_step(machine, chosen, rung) for rung in range(1, max(machine.rungs.values()) + 1))


def rung_techniques(machine: Machine, rung: int) -> list[Technique]:
    """Returns the techniques of one rung on this hardware."""
    return [technique for technique in LADDER if machine.rungs[technique.name] == rung]


def _listed(names: list[str]) -> str:
    """Returns names for display; of a long run, the first and the last."""
    return ", ".join(names) if len(names) <= _LISTED else f"{names[0]} … {names[-1]}"


def _step(machine: Machine, chosen: Candidate | None, rung: int) -> TrailStep:
    """Returns what was found on one rung."""
    techniques = rung_techniques(machine, rung)
    names = _listed([technique.name for technique in techniques]) or AS_ASKED
    fidelity = ", ".join(dict.fromkeys(str(technique.fidelity) for technique in techniques))
    if rung not in machine.space().rungs:
        return TrailStep(
            rung=rung,
            technique=names,
            verdict=Verdict.NOT_APPLICABLE,
            peak_bytes=None,
            shortfall_bytes=None,
            step_seconds=None,
            reason=_why_none(machine, techniques),
            fidelity=fidelity,
        )
    above = chosen is not None and rung > chosen.rung
    if chosen is not None and chosen.rung == rung:
        best, verdict = chosen, Verdict.CHOSEN
    else:
        best, verdict = _above(machine, rung, chosen) if chosen is not None and above else _below(machine, rung)
    used = " + ".join(technique.name for technique in best.techniques) or AS_ASKED
    time = machine.time(best.config)
    budget = machine.question.budget
    over = max(0, best.price.gpu_required_bytes - budget.gpu_bytes)
    return TrailStep(
        rung=rung,
        technique=used,
        verdict=verdict,
        peak_bytes=best.price.gpu_required_bytes,
        shortfall_bytes=over,
        step_seconds=time.known_step_seconds,
        reason=_reason(machine, best, verdict, over, at="one step from the plan" if above else "at best"),
        fidelity=fidelity,
    )


def _below(machine: Machine, rung: int) -> tuple[Candidate, Verdict]:
    """Returns the configuration that stands for a rung without a plan, and why it is none.

    That is the one nearest to the budget; where some fit in memory but none in time, the fastest of these.
    """
    space = machine.space()
    nearest = space.least_memory(rung)
    assert nearest is not None
    if not nearest[0].totals(nearest[1]).within(machine.question.budget):
        return nearest[0].candidate(nearest[1]), Verdict.TOO_LARGE
    return next(fitting_by_time(machine, space.pairs(rung), in_time=False)).candidate, Verdict.TOO_SLOW


def _above(machine: Machine, rung: int, chosen: Candidate) -> tuple[Candidate, Verdict]:
    """Returns the configuration that stands for a rung above the plan: one step from it where there is one.

    It shows what the rung would change; whether anything there is better is not asked, since a lower rung suffices.
    """
    space, budget = machine.space(), machine.question.budget
    nearest = space.one_step_from(chosen.techniques, rung) or space.least_memory(rung)
    assert nearest is not None
    frame, shape = nearest
    if not frame.totals(shape).within(budget):
        return frame.candidate(shape), Verdict.TOO_LARGE
    in_time = machine.in_time(machine.time(frame.with_shape(shape)))
    return frame.candidate(shape), Verdict.NOT_NEEDED if in_time else Verdict.TOO_SLOW


def _reason(machine: Machine, best: Candidate, verdict: Verdict, over: int, *, at: str) -> str:
    """Returns one sentence on a rung; `at` says how near to the budget what stands for it is."""
    budget = machine.question.budget
    if verdict is Verdict.CHOSEN:
        return f"fits with {format_gib(budget.gpu_bytes - best.price.gpu_required_bytes)} to spare"
    if verdict is Verdict.NOT_NEEDED:
        return "fits too, but a lower rung suffices"
    if verdict is Verdict.TOO_SLOW:
        time = machine.time(best.config)
        if machine.in_time(time):
            return f"fits, but takes {format_seconds(time.step_seconds)} per step; a higher rung is faster"
        return f"fits, but the run takes {format_seconds(time.total_seconds or 0.0)}"
    if over:
        return f"{at} {format_gib(over)} above the budget of {format_gib(budget.gpu_bytes)}"
    host = best.needs.host - (budget.host_bytes or 0)
    if budget.host_bytes is not None and host > 0:
        return f"{at} {format_gib(host)} above the host memory of {format_gib(budget.host_bytes)}"
    drive = best.price.nvme_required_bytes - budget.nvme_bytes
    return f"{at} {format_gib(drive)} above the {format_gib(budget.nvme_bytes)} of the drive"


def _why_none(machine: Machine, techniques: list[Technique]) -> str:
    """Returns why no candidate stands on a rung."""
    question = machine.question
    if not techniques:
        return "ladder.require asks for more than the run as asked"
    for technique in techniques:
        if technique.dimension in question.frozen:
            return f"pin decides {technique.dimension.value.replace('_', ' ')}"
    open_ones = [technique for technique in techniques if technique.name not in question.forbidden]
    if not open_ones:
        return "ruled out by ladder.forbid or by a pin"
    reasons = (technique.why_not(question.asked, question.situation) for technique in open_ones)
    reason = next((text for text in reasons if text is not None), None)
    return reason or "only together with techniques that are ruled out"
