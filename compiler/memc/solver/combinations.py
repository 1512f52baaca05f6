"""What the named rules say of a configuration: pins that are refused, and sentences for a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memc.config import LoraConfig, Method, Reference, TrainingConfig
from memc.errors import Diagnostic
from memc.facts import GpuFacts, ModelFacts
from memc.rules import Severity, broken_rules, facts_of, message
from memc.solver.releases import PlannedVersions
from memc.spec import LoadedSpec


def refused_combinations(
    loaded: LoadedSpec, config: TrainingConfig, lora: LoraConfig, model: ModelFacts, gpu: GpuFacts
) -> list[Diagnostic]:
    """Returns a diagnostic for each rule that the configuration as asked breaks whatever method the spec allows.

    Args:
        loaded: The spec.
        config: The configuration as asked, all pins applied.
        lora: Adapters of the methods that have some.
        model: Facts of the model.
        gpu: Facts of the card.
    """
    found = []
    by_method = []
    versions = PlannedVersions(loaded.spec.libraries.named)
    for method in loaded.spec.methods:
        adapters = None if method is Method.FULL else config.lora or lora
        off = Reference.NONE if config.reference is Reference.NONE else Reference.ADAPTERS_OFF
        reference = off if adapters is not None else config.reference
        values = facts_of(replace(config, method=method, lora=adapters, reference=reference), model, gpu)
        by_method.append((values, broken_rules(values, versions, (Severity.ERROR,))))
    values, rules = by_method[0]
    for rule in rules:
        if all(rule in others for _, others in by_method):
            field = next((name for name in rule.fields if _is_set(loaded, name)), rule.fields[0])
            found.append(loaded.diagnostic(field, "combination", f"{message(rule, values)} ({rule.id})", rule.fix))
    return found


def combination_warnings(
    config: TrainingConfig, model: ModelFacts, gpu: GpuFacts, libraries: Mapping[str, str]
) -> list[str]:
    """Returns the sentences of all rules that warn of a configuration; `libraries` are releases that the spec names."""
    values = facts_of(config, model, gpu)
    rules = broken_rules(values, PlannedVersions(libraries), (Severity.WARNING,))
    return [f"{message(rule, values)}: {rule.fix} ({rule.id})" for rule in rules]


_UNREADABLE = ("quantised-checkpoint-under-qlora", "fp8-checkpoint-of-part-blocks")
"""Rules on checkpoints that transformers cannot read as planned: a copy in 16 bits has the price, and other weights."""


def unreadable_checkpoint(
    loaded: LoadedSpec, config: TrainingConfig, model: ModelFacts, gpu: GpuFacts
) -> list[Diagnostic]:
    """Returns why no script could read the checkpoint that the model's name stands for; nothing when one can."""
    if not model.checkpoint_quantization:
        return []
    values = facts_of(config, model, gpu)
    rules = broken_rules(values, PlannedVersions(loaded.spec.libraries.named), (Severity.WARNING,))
    return [
        loaded.diagnostic(
            "model", "checkpoint-not-readable", f"{message(rule, values)} ({rule.id}); memc explain prices it", rule.fix
        )
        for rule in rules
        if rule.id in _UNREADABLE
    ]


def _is_set(loaded: LoadedSpec, field: str) -> bool:
    _, found = loaded.document.find(tuple(field.split(".")))
    return found == tuple(field.split("."))
