"""Stacks of repeated layers: where a model has them, which layers repeat, and the shallow model that stands for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from memc.trace.records import Part, Region

_LONGEST_PERIOD = 16
_EDGE = 2
"""Layers at each end that may do something else than those in between: there is no layer below or above them."""


@dataclass(frozen=True)
class Window:
    """The layers of a shallow stack that stand for several of the deep one.

    Attributes:
        first: Index of the window's first layer.
        period: How many layers it has.
        copies: How often it repeats in the deep stack after its first appearance.
    """

    first: int
    period: int
    copies: int

    @property
    def added_layers(self) -> int:
        """Layers that the deep stack has more than the shallow one."""
        return self.period * self.copies


@dataclass(frozen=True)
class StackDepth:
    """One stack of a traced model: its module name, its depth, and the depth that was run.

    `window` is None when every layer was run.
    """

    name: str
    layers: int
    traced_layers: int
    window: Window | None = None


def stacks_of(model: torch.nn.Module) -> dict[str, torch.nn.ModuleList]:
    """Returns the lists of repeated layers, by module name, in the order of the model."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) > 0
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    }


def layer_regions(model: torch.nn.Module) -> dict[str, Region]:
    """Returns the region of every module that lies in a layer, by module name."""
    regions: dict[str, Region] = {}
    for stack, layers in stacks_of(model).items():
        for index, layer in enumerate(layers):
            for name, _ in layer.named_modules(prefix=f"{stack}.{index}"):
                regions[name] = Region(Part.LAYER, index, stack)
    return regions


def best_window(kinds: Sequence[object]) -> Window | None:
    """Returns the window that leaves the fewest layers to run; None when no layer can be left out.

    `kinds` has one value per layer; layers of equal value do the same. A window of `period` layers begins after a
    layer of the same repeating part, and the layer after its last copy is one too and not the last of the stack.
    """
    best: Window | None = None
    for period in range(1, min(_LONGEST_PERIOD, len(kinds)) + 1):
        for start, end in _periodic_runs(kinds, period):
            first = max(_EDGE, start + 1)
            copies = (min(end - 1, len(kinds) - _EDGE) - first) // period - 1
            if copies > 0 and (best is None or copies * period > best.added_layers):
                best = Window(first, period, copies)
    return best


def _periodic_runs(kinds: Sequence[object], period: int) -> Iterator[tuple[int, int]]:
    """Yields the longest ranges in which every layer is like the one `period` layers later."""
    start = 0
    for index in range(len(kinds) - period + 1):
        if index == len(kinds) - period or kinds[index] != kinds[index + period]:
            yield start, index + period
            start = index + 1


def full_depths(model: torch.nn.Module) -> tuple[StackDepth, ...]:
    """Returns the stacks of a model that is run as it is."""
    return tuple(StackDepth(name, len(layers), len(layers)) for name, layers in stacks_of(model).items())


def shorten(model: torch.nn.Module) -> tuple[StackDepth, ...]:
    """Takes out of every stack the layers that repeat others, in place. Returns what became of each stack.

    What the configs list per layer is shortened with it, and positions of layers in them are moved.
    """
    depths = []
    for name, layers in stacks_of(model).items():
        owner = model.get_submodule(name.rpartition(".")[0])
        config = getattr(owner, "config", None)
        depth = len(layers)
        window = best_window(_kinds(layers, config))
        if window is not None:
            after = window.first + window.period
            kept = [*range(after), *range(after + window.added_layers, depth)]
            remaining = torch.nn.ModuleList(layers[index] for index in kept)
            setattr(owner, name.rpartition(".")[2], remaining)
            for holder in (config, owner):
                _shorten_lists(holder, depth, kept)
        depths.append(StackDepth(name, depth, depth - (window.added_layers if window else 0), window))
    return tuple(depths)


def _kinds(layers: torch.nn.ModuleList, config: Any) -> list[object]:
    """Returns for every layer what makes it do what it does: modules, shapes, settings, what the config says of it."""
    positions = [value for name, value in _values(config).items() if _has_positions(name, value, len(layers))]
    listed = [
        value
        for name, value in _values(config).items()
        if isinstance(value, list) and len(value) == len(layers) and not _has_positions(name, value, len(layers))
    ]
    return [
        (
            _kind(layer),
            tuple(str(values[index]) for values in listed),
            tuple(index in values for values in positions),
        )
        for index, layer in enumerate(layers)
    ]


def _kind(layer: torch.nn.Module) -> object:
    parts: list[object] = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str)) and not _names_position(key)
        )
        shapes = tuple((key, p.shape, p.dtype, p.requires_grad) for key, p in module.named_parameters(recurse=False))
        parts.append((name, type(module), settings, shapes))
    return tuple(parts)


def _names_position(key: str) -> bool:
    return key.endswith(("idx", "index", "layer_id", "layer_number"))


def _values(holder: Any) -> dict[str, Any]:
    return {} if holder is None else dict(vars(holder))


def _has_positions(name: str, value: object, depth: int) -> bool:
    """Returns whether a setting lists positions of layers."""
    return (
        isinstance(value, (list, tuple))
        and name.endswith(("indexes", "indices", "layers"))
        and len(value) > 0
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < depth for item in value)
        and all(older < newer for older, newer in pairwise(value))
    )


def _shorten_lists(holder: Any, depth: int, kept: Sequence[int]) -> None:
    if _values(holder).get("num_hidden_layers") == depth:
        holder.num_hidden_layers = len(kept)
    for name, value in _values(holder).items():
        if _has_positions(name, value, depth):
            vars(holder)[name] = type(value)(kept.index(item) for item in value if item in kept)
        elif isinstance(value, list) and len(value) == depth:
            vars(holder)[name] = [value[index] for index in kept]
