"""LADDER: the one place that orders the techniques."""

from __future__ import annotations

from memc.ladder import sharding, states, work
from memc.ladder.technique import Technique
from memc.ladder.work import with_micro_batch

__all__ = ["LADDER", "technique_names", "with_micro_batch"]

LADDER: tuple[Technique, ...] = (
    work.CHUNKED_LOSS,
    *(work.accumulation(divisor) for divisor in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
    *(work.checkpointing(every) for every in (4, 3, 2, 1)),
    work.CHECKPOINT_OFFLOAD,
    *sharding.GRADIENT_SHARDING,
    *states.OPTIMIZERS,
    *states.PURE,
    sharding.ENGINE_STATES,
    states.ADAPTERS,
    *states.METHODS,
    states.PAGED,
    sharding.OFFLOAD_OPTIMIZER,
    *sharding.WEIGHT_SHARDING,
    *(work.context_parallel(size) for size in (2, 4, 8)),
    sharding.OFFLOAD_PARAM,
    *sharding.NVME,
)


def technique_names() -> tuple[str, ...]:
    """Returns the names that a spec may forbid or require, in ladder order."""
    return tuple(technique.name for technique in LADDER)
