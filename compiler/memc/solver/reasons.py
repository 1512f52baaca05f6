"""Why the plan is what it is: what stands in the way as asked, what the rungs below lack, what was not needed."""

from __future__ import annotations

from memc.clock import StepTime
from memc.ladder import Dimension
from memc.plan import TrailStep, Verdict
from memc.solver.frames import Shape
from memc.solver.search import Machine
from memc.solver.timed import Timed
from memc.solver.walls import host_wall, in_words, loss_wall, states_wall
from memc.units import format_gib, format_seconds

_SHOWN_ABOVE = 2
_NOTABLE_SHARE = 1.02


def reasons(machine: Machine, best: Timed, steps: tuple[TrailStep, ...]) -> tuple[str, ...]:
    """Returns sentences for a person, in the order in which an answer is given.

    Args:
        machine: The priced question.
        best: The choice.
        steps: Its trail.
    """
    chosen = best.candidate
    found = []
    if chosen.techniques:
        found += [_as_asked(machine), *states_wall(machine), *_below(machine, best, steps)]
    found += [*loss_wall(machine, best.config), *host_wall(machine, chosen.price.ledger())]
    found += _above(best.time, steps, chosen.rung)
    return (*found, *_micro_batch(machine, best))


def _as_asked(machine: Machine) -> str:
    """Returns what the run as asked needs, and the largest entry of it."""
    gpu = machine.estimator.ledger(machine.question.asked).gpu
    alive = [entry for entry in gpu.entries if gpu.binding_moment in entry.moments]
    largest = max(alive, key=lambda entry: entry.bytes)
    return (
        f"as asked each GPU needs {format_gib(gpu.required_bytes)}, in phase {gpu.binding_phase}; the largest entry is "
        f"{largest.name} with {format_gib(largest.bytes)}: {in_words(largest)}"
    )


def _below(machine: Machine, best: Timed, steps: tuple[TrailStep, ...]) -> list[str]:
    """Returns what the nearest rung below lacks, and what of the plan closes the gap."""
    chosen = best.candidate
    failing = [step for step in steps if step.rung < chosen.rung and step.peak_bytes is not None]
    if not failing:
        return []
    short = [step for step in failing if step.verdict is Verdict.TOO_LARGE]
    nearest = min(short or failing, key=lambda step: (step.shortfall_bytes or 0, -step.rung))
    own = ", ".join(item.name for item in chosen.techniques if machine.rungs[item.name] == chosen.rung)
    if not short:
        return [f"lower rungs fit, but not in time; {own} is what the time budget takes"]
    over = nearest.shortfall_bytes or 0
    gap = f"{format_gib(over)} short on each GPU" if over else nearest.reason.removeprefix("at best ")
    return [f"the nearest rung below, {nearest.technique}, is {gap}; {own} closes the gap"]


def _above(time: StepTime, steps: tuple[TrailStep, ...], rung: int) -> list[str]:
    """Returns the rungs that would do as well, with what they cost."""
    more = [step for step in steps if step.rung > rung and step.verdict is Verdict.NOT_NEEDED and step.step_seconds]
    shown = [
        f"{step.technique} (x{(step.step_seconds or 0) / time.step_seconds:.2f} the time of a step)"
        for step in more[:_SHOWN_ABOVE]
    ]
    return [f"not needed, though it would fit: {'; '.join(shown)}"] if shown else []


def _micro_batch(machine: Machine, best: Timed) -> list[str]:
    """Returns which micro-batch is fastest and why, where that is not the largest that fits."""
    frame, own = best.frame, _others(best.shape)
    fitting = [
        shape
        for line in frame.lines
        if _others(line.shapes[0]) == own
        for shape in line.shapes[: machine.space().fitting_shapes(frame, line)]
    ]
    largest = max(fitting, key=lambda shape: frame.with_shape(shape).micro_batch_size)
    ours, other = frame.with_shape(best.shape), frame.with_shape(largest)
    if ours.micro_batch_size == other.micro_batch_size or best.time.unknown:
        return []
    slower = machine.time(other)
    if slower.step_seconds < best.time.step_seconds * _NOTABLE_SHARE:
        why = "takes as long, and leaves less room"
    else:
        why = f"takes {format_seconds(slower.step_seconds)}: {_difference(best.time, slower)}"
    return [
        f"micro-batch {ours.micro_batch_size} takes {format_seconds(best.time.step_seconds)} per step; "
        f"{other.micro_batch_size}, the largest that fits, {why}"
    ]


def _others(shape: Shape) -> set[str]:
    """Returns the techniques of a shape but for that of its micro-batch."""
    return {item.name for item in shape.techniques if item.dimension is not Dimension.MICRO_BATCH}


def _difference(ours: StepTime, other: StepTime) -> str:
    """Returns the part of a step that makes another one slower."""
    parts = {
        "more matrix products": other.compute_seconds - ours.compute_seconds,
        "more memory traffic": other.bandwidth_seconds - ours.bandwidth_seconds,
        "communication that hides less": other.communication_seconds - ours.communication_seconds,
        "transfers that hide less": other.offload_seconds - ours.offload_seconds,
    }
    return max(parts, key=lambda name: parts[name])
