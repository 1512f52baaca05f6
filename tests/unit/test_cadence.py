"""A job with a time limit: how often it saves, and what is said of a run that takes longer."""

from __future__ import annotations

import math

import pytest
from memc.resolution import resolution
from memc.spec import parse_spec
from planspecs import plan_of, spec_text


def limited(hours: int | None, more: str = "", **changes: str) -> str:
    launch = f"launch: {{scheduler: slurm, time_limit: {hours}}}\n" if hours else ""
    return spec_text(samples="100000", more=launch + more, **changes)


def test_a_job_that_is_ended_has_saved_most_of_its_work() -> None:
    free, plan = plan_of(limited(None)), plan_of(limited(1))
    mean = plan.clock.mean_step_seconds
    assert mean is not None
    assert plan.run.save_steps * mean == pytest.approx(360, abs=mean)
    assert free.run.save_steps * mean == pytest.approx(3600, abs=mean)
    assert plan.total_steps is not None and plan.clock.total_seconds is not None
    jobs = math.ceil(plan.clock.total_seconds / (3600 // (plan.run.save_steps * mean) * plan.run.save_steps * mean))
    assert "launch.time_limit of 1 h ends the run, which takes about" in plan.warnings[0]
    assert f"some {jobs} jobs, each after the first started with --resume" in plan.warnings[0]
    assert not any("time_limit" in line for line in free.warnings)


@pytest.mark.parametrize(("steps", "said"), [(100000, "a checkpoint comes after"), (0, "it saves none on the way")])
def test_a_job_that_ends_before_its_first_checkpoint_is_named(steps: int, said: str) -> None:
    pinned = f"global_batch_size: 16, save_steps: {steps}"
    warning = plan_of(limited(1).replace("global_batch_size: 16", pinned)).warnings[0]
    assert warning.startswith("A JOB ENDS BEFORE IT SAVES: launch.time_limit is 1 h and")
    assert said in warning


def test_a_run_that_is_done_in_time_is_not_spoken_of() -> None:
    plan = plan_of(limited(8000))
    assert not any("time_limit" in line for line in plan.warnings)
    epochs = plan_of(spec_text(more="launch: {scheduler: slurm, time_limit: 24}\n"))
    assert not any("time_limit" in line for line in epochs.warnings)


def test_the_reason_of_the_cadence_is_the_time_between() -> None:
    for text, said in ((limited(1), "6.0 min, of the 1 h of a job"), (spec_text(samples="50"), "once per epoch")):
        loaded = parse_spec(text, "spec.yaml")
        (row,) = [item for item in resolution(loaded, plan_of(text)) if item.field == "training.save_steps"]
        assert said in row.reason
