"""New tokens beside adapters: rows that train are put into a copy of the whole table, and taken out of its gradient."""

from __future__ import annotations

from memc.config import TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.parts import BACKWARD, gpu_entry

_SOURCE = "peft 0.21.2 tuners/trainable_tokens/layer.py get_merged_weights"


def token_entries(model: ModelFacts, config: TrainingConfig) -> list[Entry]:
    """Returns what the rows of new tokens cost beside their own size, which is counted with the adapters.

    Assumes: the copy for the embedding is let go of once the rows are looked up; that of the head is kept for backward,
        where the loss makes a gradient of the whole.
    """
    lora = config.lora
    if lora is None or not lora.new_tokens:
        return []
    size, rows = dtypes(config).weight, model.vocab_size * model.hidden_size
    whole = f"{size} B x {model.vocab_size} tokens x hidden {model.hidden_size}"
    used = f"{whole}: the head as it is used"
    kept = frozenset({Moment.FORWARD, Moment.LOSS, Moment.BACKWARD_FIRST_LAYER})
    waits = BACKWARD if model.tied else frozenset({Moment.BACKWARD_FIRST_LAYER})
    return [
        gpu_entry("table-with-new-rows", Account.PARAMETERS, size * rows, kept, used, _SOURCE),
        gpu_entry(
            "gradient-of-the-table",
            Account.GRADIENTS,
            size * rows,
            frozenset({*waits, Moment.BACKWARD_EMBEDDING}),
            f"{whole}: of which the new rows are taken",
            _SOURCE,
        ),
    ]
