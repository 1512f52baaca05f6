"""The output head and the loss on other stacks than memc's own; the rest of it is in the activations."""

from __future__ import annotations

from memc.config import LossHead, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.constants import MEMC_STACK, LedgerFacts
from memc.ledger.entries import Entry
from memc.ledger.logits import stack_loss_entries


def loss_entries(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> list[Entry]:
    """Returns what head and loss hold where the stack decides it; else they are run with the layers."""
    if config.loss is LossHead.CHUNKED or facts.stack == MEMC_STACK:
        return []
    return stack_loss_entries(model, config, facts.stack)
