"""What a GPU holds of other GPUs' part of a sequence that they share."""

from __future__ import annotations

from memc.config import TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment, Resource
from memc.ledger.parts import BACKWARD

_SOURCE = "torch distributed/tensor/experimental/_context_parallel/_attention.py"


def context_entries(model: ModelFacts, config: TrainingConfig) -> list[Entry]:
    """Returns the keys and values that attention gathers from the ranks of its group, and its fp32 sum of outputs.

    Assumes: accelerate's default way of sharing, which gathers all keys and values of one layer at once, in forward and
        again in backward. Both are gone before the layer's feed-forward part runs, whose working set is counted at the
        same moments: the entry may be too much by all of it, and is given so.
    """
    if config.context_parallel == 1:
        return []
    size, micro = dtypes(config).compute, config.micro_batch_sequences
    attentions = [group.block.attention for group in model.groups if not group.block.attention.linear]
    if not attentions:
        return []
    keys = max(attention.key_width for attention in attentions)
    queries = max(attention.query_width for attention in attentions)
    gathered = 2 * size * keys * micro * config.max_length
    merged = 4 * queries * config.micro_batch_tokens
    return [
        Entry(
            name="gathered-keys-and-values",
            account=Account.WORKSPACE,
            resource=Resource.GPU,
            bytes=gathered + merged,
            moments=frozenset({Moment.FORWARD, Moment.EVALUATE}) | (BACKWARD - {Moment.BACKWARD_EMBEDDING}),
            formula=f"2 x {size} B x {keys} wide x {micro} x {config.max_length} tokens + 4 B x {queries} wide x "
            f"{config.micro_batch_tokens} tokens",
            source=_SOURCE,
            uncertainty_bytes=gathered + merged,
            uncertainty="attention's buffers and the feed-forward part are not alive together",
        )
    ]
