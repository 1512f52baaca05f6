"""The technique that does without a second model: the reference of preference training, scored once ahead."""

from __future__ import annotations

from dataclasses import replace

from memc.config import Engine, Reference, Task, TrainingConfig
from memc.ladder.technique import Dimension, Fidelity, Situation, Technique
from memc.ledger.entries import Account


def _why_not(config: TrainingConfig, _situation: Situation) -> str | None:
    if config.task is not Task.DPO:
        return "only preference training (task dpo) has a reference"
    if config.reference is Reference.PRECOMPUTED:
        return "the reference is computed ahead already"
    if config.reference is Reference.ADAPTERS_OFF:
        return "the model with its adapters off is the reference: there is no second one"
    if config.engine not in (Engine.SINGLE, Engine.DDP):
        return f"under {config.engine} scoring ahead takes a second engine or a second model, which memc does not write"
    return None


PRECOMPUTED = Technique(
    name="precomputed-reference",
    rung=2,
    dimension=Dimension.REFERENCE,
    accounts=(Account.PARAMETERS, Account.ACTIVATIONS),
    fidelity=Fidelity.MEMORY,
    needs="task dpo with method full, one process or DDP",
    boundary="Scores every pair once before the first step, those that a short run never sees included.",
    why_not=_why_not,
    apply=lambda config, _: replace(config, reference=Reference.PRECOMPUTED),
)
