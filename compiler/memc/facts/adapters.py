"""LoRA over a model's linears: which modules carry an adapter and how many parameters that trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from memc.errors import usage_error
from memc.facts.documents import nearest
from memc.facts.records import Component, ModelFacts


def lora_params(model: ModelFacts, target_modules: Sequence[str], rank: int) -> int:
    """Returns the elements that rank-`rank` adapters on `target_modules` add: rank x (in + out) per linear.

    Assumes: plain LoRA (no DoRA, no trained bias), the head excluded. PEFT looks for a name in the whole model, so it
        counts in every stack and outside the layers too.
    Source: peft 0.21.2, tuners/lora/layer.py (lora_A in x r, lora_B r x out, both without bias).

    Raises:
        MemcError: ``lora-target-unknown`` when a name is no linear of the model.
    """
    wanted = set(target_modules)
    known = model.linear_names()
    for name in target_modules:
        if name not in known:
            close = nearest(name, known, count=1)
            raise usage_error(
                "lora-target-unknown",
                f"{model.key} has no linear called {name!r}{f'; nearest: {close[0]}' if close else ''}",
                hint=f"choose among {', '.join(known)}",
            )
    return sum(
        count * rank * (linear.in_features + linear.out_features)
        for linear, count in model.linear_modules()
        if linear.name in wanted and linear.adaptable
    )


def default_lora_targets(model: ModelFacts, kind: Literal["attention", "all-linear"]) -> tuple[str, ...]:
    """Returns the module names of a target set, in forward order.

    Args:
        model: The model.
        kind: ``attention`` for the projections of attention, ``all-linear`` for every linear of the blocks. PEFT's
            word ``all-linear`` leaves out the output head too, but adapts fused experts besides: pass these names.
    """
    components = {Component.ATTENTION} if kind == "attention" else set(Component)
    names: dict[str, None] = {}
    for group in (group for stack in model.stacks for group in stack.groups):
        for linear in group.block.linears:
            if linear.component in components and linear.adaptable:
                names[linear.name] = None
    return tuple(names)
