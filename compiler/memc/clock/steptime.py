"""StepTime: the seconds of one optimizer step, by part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step on one GPU (all micro-batches of it), by part.

    Attributes:
        compute_seconds: Matrix products and attention, recompute included, and what the host's launching adds.
        bandwidth_seconds: Memory-bound work: norms, loss, optimizer, dequantisation.
        communication_seconds: Collectives that do not overlap with compute.
        offload_seconds: PCIe transfers and CPU optimizer time that do not overlap.
        tokens_per_step: Tokens over all GPUs in one optimizer step.
        world_size: GPUs.
        total_seconds: The whole run, evaluation and saving included; None when the amount of data is unknown.
        total_usd: Its price; None when seconds or the price per hour are unknown.
        assumptions: Sentences: rates taken from the datasheet for lack of a measurement.
        evaluation_seconds: Of the whole run, in evaluation; 0 when not counted.
        saving_seconds: Of the whole run, in writing checkpoints; 0 when not counted.
        unknown: Facts of the card that are not known: the seconds order configurations then, and say nothing else.
        mean_step_seconds: A step whose samples have the mean length instead of the longest; None when not counted.
        length_share: Mean tokens of a sequence over the longest.
    """

    compute_seconds: float
    bandwidth_seconds: float
    communication_seconds: float
    offload_seconds: float
    tokens_per_step: int
    world_size: int
    total_seconds: float | None
    total_usd: float | None
    assumptions: tuple[str, ...] = ()
    evaluation_seconds: float = 0.0
    saving_seconds: float = 0.0
    unknown: tuple[str, ...] = ()
    mean_step_seconds: float | None = None
    length_share: float = 1.0

    @property
    def known_step_seconds(self) -> float | None:
        """All parts together; None when a fact of the card is unknown."""
        return None if self.unknown else self.step_seconds

    @property
    def step_seconds(self) -> float:
        """All parts together."""
        return self.compute_seconds + self.bandwidth_seconds + self.communication_seconds + self.offload_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of one GPU in steps of full length."""
        return self.tokens_per_step / self.step_seconds / self.world_size

    @property
    def mean_tokens_per_second_per_gpu(self) -> float | None:
        """Throughput of one GPU in steps of mean length, which hold fewer tokens; None when they are not counted."""
        if self.mean_step_seconds is None:
            return None
        return self.tokens_per_step * self.length_share / self.mean_step_seconds / self.world_size

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of the whole run; None when its length is unknown."""
        return None if self.total_seconds is None else self.total_seconds / 3600 * self.world_size
