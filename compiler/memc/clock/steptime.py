"""StepTime: the seconds of one optimizer step, by part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step on one GPU (all micro-batches of it), by part.

    Attributes:
        compute_seconds: Matrix products and attention, recompute included.
        bandwidth_seconds: Memory-bound work: norms, loss, optimizer, dequantisation.
        communication_seconds: Collectives that do not overlap with compute.
        offload_seconds: PCIe transfers and CPU optimizer time that do not overlap.
        tokens_per_step: Tokens over all GPUs in one optimizer step.
        world_size: GPUs.
        total_seconds: The whole run; None when the amount of data is unknown.
        total_usd: Its price; None when seconds or the price per hour are unknown.
        assumptions: Sentences: overlap, rates taken from the datasheet for lack of a measurement.
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

    @property
    def step_seconds(self) -> float:
        """All parts together."""
        return self.compute_seconds + self.bandwidth_seconds + self.communication_seconds + self.offload_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of one GPU."""
        return self.tokens_per_step / self.step_seconds / self.world_size
