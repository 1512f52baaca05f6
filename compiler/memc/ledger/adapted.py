"""Which stacks of a model carry adapters: a name is looked for in all of them but those that a configuration skips."""

from __future__ import annotations

from dataclasses import replace

from memc.config import TrainingConfig
from memc.facts.records import Linear, ModelFacts, Stack

_SKIPPED: dict[tuple[int, tuple[str, ...]], tuple[ModelFacts, ModelFacts]] = {}


def adapted_model(model: ModelFacts, config: TrainingConfig) -> ModelFacts:
    """Returns the model with no linear that could carry an adapter in the stacks that the configuration skips.

    The same objects give the same one.
    Source: peft 0.21.2 tuners/tuners_utils.py check_target_module_exists (`exclude_modules`).
    """
    lora = config.lora
    if lora is None or not lora.skipped_stacks:
        return model
    key = id(model), lora.skipped_stacks
    found = _SKIPPED.get(key)
    if found is None or found[0] is not model:
        found = _SKIPPED[key] = (model, without_adapters(model, lora.skipped_stacks))
    return found[1]


def without_adapters(model: ModelFacts, stacks: tuple[str, ...]) -> ModelFacts:
    """Returns the model with no linear that could carry an adapter in some of its stacks, given by name."""
    others = tuple(_bare(stack) if stack.name in stacks else stack for stack in model.other_stacks)
    return replace(model, other_stacks=others)


def _bare(stack: Stack) -> Stack:
    groups = tuple(
        replace(group, block=replace(group.block, linears=_unadapted(group.block.linears))) for group in stack.groups
    )
    return replace(stack, groups=groups, linears=_unadapted(stack.linears))


def _unadapted(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    return tuple(replace(linear, adaptable=False) for linear in linears)
