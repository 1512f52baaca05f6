"""What the caching allocator holds above what lies in it: three steps of a pinned configuration, replayed."""

from __future__ import annotations

from memc.config import TrainingConfig
from memc.facts import ModelFacts
from memc.ledger.constants import LedgerFacts

from published.per_parameter import PerParameterReplay
from published.replay import Replay

_STEPS = 3


def reserved_above_allocated(
    model: ModelFacts, config: TrainingConfig, facts: LedgerFacts, capacity_bytes: int | None
) -> int:
    """Returns peak reserved less peak allocated bytes of a replay on one GPU.

    Args:
        model: The model, with block programs.
        config: The configuration.
        facts: Library facts, with the stack.
        capacity_bytes: What the card has; cached segments are given back when it is reached.
    """
    replay = replay_of(model, config, facts, capacity_bytes)
    for _ in range(_STEPS):
        replay.step()
    return replay.allocator.peak_reserved_bytes - replay.allocator.peak_allocated_bytes


def replay_of(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts, capacity_bytes: int | None) -> Replay:
    """Returns the replay of a configuration's engine, nothing run yet. Arguments are as above."""
    second = config.fsdp is not None and config.fsdp.version == 2
    return (PerParameterReplay if second else Replay)(model, config, facts, capacity_bytes)
