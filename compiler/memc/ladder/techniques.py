"""LADDER: the one place that orders the techniques."""

from __future__ import annotations

from memc.ladder import reference, sharding, states, work
from memc.ladder.technique import Technique
from memc.ladder.work import with_micro_batch

__all__ = ["LADDER", "technique_names", "with_micro_batch"]

# Small ones all, so that batches with odd factors come down to a micro-batch of one; larger ones as people write them.
_DIVISORS = (
    *range(2, 17),
    *(18, 20, 21, 24, 25, 27, 28, 30, 32, 36, 40, 45, 48, 50, 54, 56, 60, 63, 64, 72, 75, 80, 90, 96, 100, 112, 120),
    *(128, 144, 150, 160, 180, 192, 200, 224, 240, 250, 256, 300, 320, 384, 400, 448, 480, 500, 512, 600, 640, 768),
    *(800, 896, 960, 1000, 1024),
)
LADDER: tuple[Technique, ...] = (
    work.CHUNKED_LOSS,
    reference.PRECOMPUTED,
    *(work.accumulation(divisor) for divisor in _DIVISORS),
    *(work.checkpointing(every) for every in (4, 3, 2, 1)),
    work.CHECKPOINT_OFFLOAD,
    *sharding.GRADIENT_SHARDING,
    *states.OPTIMIZERS,
    *states.PURE,
    sharding.ENGINE_STATES,
    states.ADAPTERS,
    work.FP8,
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
