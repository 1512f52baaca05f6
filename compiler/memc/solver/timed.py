"""A configuration that fits, with its time."""

from __future__ import annotations

from dataclasses import dataclass

from memc.clock import StepTime
from memc.config import TrainingConfig
from memc.solver.frames import Candidate, Frame, Shape


@dataclass(frozen=True, slots=True)
class Timed:
    """A configuration that fits, with its time."""

    frame: Frame
    shape: Shape
    time: StepTime

    @property
    def config(self) -> TrainingConfig:
        """The configuration."""
        return self.frame.with_shape(self.shape)

    @property
    def candidate(self) -> Candidate:
        """The configuration with its techniques and its price."""
        return self.frame.candidate(self.shape)

    @property
    def seconds_per_sample(self) -> float:
        """Step time over the samples of the step."""
        return self.time.step_seconds / self.config.global_batch_size
