"""The loss of preference training as TRL's DPOTrainer computes it, with its reference, under a tape."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from memc.config import Reference, TrainingConfig
from memc.trace.build import Given, build, place
from memc.trace.records import Owner
from memc.trace.tape import Tape

_BETA = 0.1  # any value: none changes a size


def reference_model(config: TrainingConfig, given: Given, tape: Tape) -> Any:
    """Returns the frozen second model, placed and claimed as parameters; None where there is none."""
    if config.reference is not Reference.MODEL:
        return None
    model, _ = build(config, given, shallow=False)
    model.requires_grad_(False).eval()
    place(model, config, tape, {})
    tape.claim(model.parameters(), Owner.PARAMETERS)
    tape.claim(model.buffers(), Owner.PARAMETERS)
    return model


def preference_loss(
    config: TrainingConfig,
    model: Any,
    reference: Any,
    batch: dict[str, Any],
    precision: Callable[[TrainingConfig], AbstractContextManager[None]],
) -> torch.Tensor:
    """Returns the loss of a batch whose first half are the better answers; no number of it means anything.

    Source: trl 1.16.0 trainer/dpo_trainer.py _compute_loss, loss type sigmoid.
    """
    with precision(config):
        outputs = model(**batch, fused_lm_head=True)
    chosen, rejected = outputs.log_probs.sum(dim=1).chunk(2)
    if config.reference is Reference.PRECOMPUTED:
        reference_chosen, reference_rejected = torch.zeros_like(chosen), torch.zeros_like(rejected)
    else:
        off = model.disable_adapter() if config.reference is Reference.ADAPTERS_OFF else nullcontext()
        with torch.no_grad(), off, precision(config):
            scored = (model if reference is None else reference)(**batch, fused_lm_head=True)
        reference_chosen, reference_rejected = scored.log_probs.sum(dim=1).chunk(2)
    difference = (chosen - reference_chosen) - (rejected - reference_rejected)
    loss: torch.Tensor = -logsigmoid(_BETA * difference).mean()
    return loss
