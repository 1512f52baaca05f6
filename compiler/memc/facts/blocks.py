"""Blocks of a model: linears, norms and attention of each layer, built from an architecture file and its names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memc.facts.architectures import Names
from memc.facts.programs import program_sizes, program_text
from memc.facts.records import AttentionFacts, Block, BlockGroup, Component, Linear, MlpFacts, Norm, NormKind, Tensor

_NO_FLAGS: Mapping[str, bool] = {}


def build_groups(stack: Mapping[str, Any], names: Names, config: Mapping[str, Any]) -> tuple[BlockGroup, ...]:
    """Returns the layers of a stack: runs of equal blocks, in order.

    Args:
        stack: The description of the stack.
        names: What its names stand for.
        config: The config, for lists with one item per layer.
    """
    layers = range(names.size(stack.get("layers", "layers")))
    rules = dict(stack.get("layer_kinds", {}))
    sliding = stack["attention"].get("sliding")
    if sliding is not None and names.switch(sliding["window"]) is not None:
        rules["slides"] = {"types_equal": "sliding_attention", **sliding}
    kinds = {name: _layers_that(rule, layers, names, config) for name, rule in rules.items()}
    groups: list[BlockGroup] = []
    for layer in layers:
        block = _block(stack, names, {"slides": False, **{name: flags[layer] for name, flags in kinds.items()}})
        if groups and groups[-1].block == block:
            groups[-1] = BlockGroup(block=block, count=groups[-1].count + 1)
        else:
            groups.append(BlockGroup(block=block, count=1))
    return tuple(groups)


def _layers_that(rule: Mapping[str, Any], layers: range, names: Names, config: Mapping[str, Any]) -> Sequence[bool]:
    """Returns for each layer whether a rule of `layer_kinds` (or of sliding attention) holds for it."""
    if not names.switch(rule.get("enabled", True)):
        return [False for _ in layers]
    excluded = frozenset(config.get(rule.get("unless_listed_key", "")) or ())
    return [holds and layer not in excluded for layer, holds in enumerate(_pattern(rule, layers, names, config))]


def _pattern(rule: Mapping[str, Any], layers: range, names: Names, config: Mapping[str, Any]) -> Sequence[bool]:
    types = config.get("layer_types")
    if "types_equal" in rule and isinstance(types, list) and len(types) == len(layers):
        return [kind == rule["types_equal"] for kind in types]
    flags = config.get(rule.get("zero_flags_key", ""))
    if isinstance(flags, list) and len(flags) == len(layers):
        return [not flag for flag in flags]
    flags = config.get(rule.get("one_flags_key", ""))
    if isinstance(flags, list) and len(flags) == len(layers):
        return [bool(flag) for flag in flags]
    listed = config.get(rule.get("listed_key", ""))
    if isinstance(listed, list):
        return [layer in listed for layer in layers]
    if "only_layer" in rule:
        return [layer == rule["only_layer"] for layer in layers]
    if "first_layer" in rule:
        first = names.size(rule["first_layer"])
        return [layer >= first for layer in layers]
    if "all_but_every" in rule:
        every, shift = names.size(rule["all_but_every"]), rule.get("shift", 1)
        return [(layer + shift) % every != 0 for layer in layers]
    if "only_every" in rule:
        every = names.size(rule["only_every"])
        return [(layer + 1) % every == 0 for layer in layers]
    return [True for _ in layers]


def _block(stack: Mapping[str, Any], names: Names, flags: Mapping[str, bool]) -> Block:
    cross = stack.get("cross_attention")
    forward = program_text(stack["forward"]) if "forward" in stack else ""
    return Block(
        layer_class=stack["layer_class"],
        linears=build_linears(stack.get("linears", ()), names, flags),
        norms=build_norms(stack.get("norms", ()), names, flags),
        attention=_attention(_variant(stack["attention"], names, flags), names, slides=flags["slides"]),
        mlp=_mlp(_variant(stack["mlp"], names, flags), names),
        tensors=build_tensors(stack.get("tensors", ()), names, flags),
        cross_attention=None if cross is None else _attention(cross, names, slides=False),
        forward=forward,
        sizes=program_sizes(forward, names, flags),
    )


def build_side_block(
    stack: Mapping[str, Any], program: str, names: Names, groups: Sequence[BlockGroup], norms: tuple[Norm, ...]
) -> Block | None:
    """Returns what runs before or after the layers of a stack as a block of its own; None when there is no program.

    Args:
        stack: The description of the stack.
        program: The key of the program, ``before`` or ``after``.
        names: What its names stand for.
        groups: The layers, whose widths it shares.
        norms: The norms that it may name.
    """
    if program not in stack:
        return None
    forward = program_text(stack[program])
    return Block(
        layer_class="",
        linears=build_linears(stack.get("outer_linears", ()), names),
        norms=norms,
        attention=groups[0].block.attention,
        mlp=groups[0].block.mlp,
        tensors=build_tensors(stack.get("outer_tensors", ()), names),
        forward=forward,
        sizes=program_sizes(forward, names, _NO_FLAGS),
    )


def _variant(section: Mapping[str, Any], names: Names, flags: Mapping[str, bool]) -> Mapping[str, Any]:
    """Returns a section with what its first fitting variant changes."""
    for variant in section.get("variants", ()):
        if names.holds(variant, flags):
            return {**section, **variant}
    return section


def _attention(section: Mapping[str, Any], names: Names, *, slides: bool) -> AttentionFacts:
    value_dim, within = section.get("value_head_dim"), section.get("within")
    return AttentionFacts(
        heads=names.size(section.get("heads", "heads")),
        kv_heads=names.size(section.get("kv_heads", "kv_heads")),
        head_dim=names.size(section.get("head_dim", "head_dim")),
        sliding_window=names.switch(section["sliding"]["window"]) if slides else None,
        logit_softcap=names.switch(section.get("logit_softcap")),
        fused_qkv=section.get("fused_qkv", False),
        value_head_dim=None if value_dim is None else names.size(value_dim),
        causal=section.get("causal", True),
        linear=section.get("linear", False),
        rotary=section.get("rotary", True),
        eager_only=section.get("eager_only", False),
        always_masked=section.get("always_masked", False),
        mixed_heads=bool(names.switch(section.get("mixed_heads", False))),
        padded=section.get("padded", True),
        within=None if within is None else names.size(within),
        made_after_norm=section.get("made_after_norm", False),
        rotary_kinds=section.get("rotary_kinds", 1),
        position_table=names.size(section.get("position_table", 0)),
    )


def _mlp(section: Mapping[str, Any], names: Names) -> MlpFacts:
    gated = section["gated"]
    return MlpFacts(
        intermediate=names.size(section.get("intermediate", "intermediate")),
        gated=bool(names.switch(gated)),
        fused_gate_up=section.get("fused_gate_up", False),
        activation=names.switch(section.get("activation", "activation")),
        experts=names.size(section.get("experts", 0)),
        experts_per_token=names.size(section.get("experts_per_token", 0)),
        shared_intermediate=names.size(section.get("shared_intermediate", 0)),
        router_class=section.get("router_class", ""),
    )


def build_linears(
    entries: Sequence[Mapping[str, Any]], names: Names, flags: Mapping[str, bool] = _NO_FLAGS
) -> tuple[Linear, ...]:
    """Returns the linears of the entries whose conditions hold."""
    return tuple(
        Linear(
            name=entry["name"],
            component=Component(entry["component"]),
            in_features=names.size(entry["in"]),
            out_features=names.size(entry["out"]),
            bias=bool(names.switch(entry["bias"])),
            reads=entry["reads"],
            path=entry.get("path", ""),
            quantized=entry.get("quantized", True),
            adaptable=entry.get("adaptable", True),
        )
        for entry in entries
        if names.holds(entry, flags)
    )


def build_tensors(
    entries: Sequence[Mapping[str, Any]], names: Names, flags: Mapping[str, bool] = _NO_FLAGS
) -> tuple[Tensor, ...]:
    """Returns the tensors of the entries whose conditions hold."""
    return tuple(
        Tensor(
            name=entry["name"],
            component=Component(entry["component"]),
            params=names.size(entry["params"]),
            trains=entry.get("trains", True),
            fp32=entry.get("fp32", False),
        )
        for entry in entries
        if names.holds(entry, flags)
    )


def build_norms(
    entries: Sequence[Mapping[str, Any]], names: Names, flags: Mapping[str, bool] = _NO_FLAGS
) -> tuple[Norm, ...]:
    """Returns the norms of the entries whose conditions hold."""
    return tuple(build_norm(entry, names) for entry in entries if names.holds(entry, flags))


def build_norm(entry: Mapping[str, Any], names: Names) -> Norm:
    """Returns the norm that one entry of an architecture file describes."""
    return Norm(
        name=entry["name"],
        kind=NormKind(entry["kind"]),
        size=names.size(entry["size"]),
        rows=names.size(entry.get("rows", 1)),
        params=names.size(entry["params"]),
        feeds=entry.get("feeds", ""),
    )
