"""How often a run saves, and what becomes of one that its scheduler ends before it is done."""

from __future__ import annotations

import math

from memc.clock import StepTime
from memc.plan import RunSettings
from memc.spec_fields import Launch
from memc.units import format_seconds

_LONGEST_LOSS_SECONDS = 3600
_JOB_PARTS = 10
"""A job that is ended by its time limit loses at most one part in so many of it."""


def longest_loss_seconds(launch: Launch) -> float:
    """Returns the seconds of work that may be lost between two checkpoints: an hour, or a part of a shorter job."""
    limit = launch.time_limit
    return _LONGEST_LOSS_SECONDS if limit is None else min(_LONGEST_LOSS_SECONDS, 3600 * limit / _JOB_PARTS)


def limit_warnings(run: RunSettings, time: StepTime) -> tuple[str, ...]:
    """Returns what the time limit of a job means for a run that takes longer; nothing where that is not known."""
    limit, mean = 3600 * run.time_limit_hours, time.mean_step_seconds
    if not limit or mean is None or time.unknown:
        return ()
    between = run.save_steps * mean
    ends = time.total_seconds is not None and time.total_seconds <= limit
    if not ends and not 0 < between < limit:
        saves = f"a checkpoint comes after {format_seconds(between)}" if run.save_steps else "it saves none on the way"
        return (
            f"A JOB ENDS BEFORE IT SAVES: launch.time_limit is {run.time_limit_hours} h and {saves}, so every job "
            "starts where the one before it did; set training.save_steps lower, or leave it out",
        )
    if time.total_seconds is None or ends:
        return ()
    kept = limit // between * between
    jobs = math.ceil(time.total_seconds / kept)
    return (
        f"launch.time_limit of {run.time_limit_hours} h ends the run, which takes about "
        f"{format_seconds(time.total_seconds)}: some {jobs} jobs, each after the first started with --resume; "
        f"a checkpoint comes every {format_seconds(between)}",
    )
