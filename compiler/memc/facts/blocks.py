"""Blocks of a model: linears, norms and attention of each layer, built from an architecture file and its names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memc.facts.architectures import Names
from memc.facts.records import AttentionFacts, Block, BlockGroup, Component, Linear, MlpFacts, Norm, NormKind, Tensor


def build_groups(architecture: Mapping[str, Any], names: Names, config: Mapping[str, Any]) -> tuple[BlockGroup, ...]:
    """Returns the layers of a model: runs of equal blocks, in order."""
    sliding = _sliding_layers(architecture["attention"].get("sliding"), names, config)
    groups: list[BlockGroup] = []
    for slides in sliding:
        block = _block(architecture, names, slides=slides)
        if groups and groups[-1].block == block:
            groups[-1] = BlockGroup(block=block, count=groups[-1].count + 1)
        else:
            groups.append(BlockGroup(block=block, count=1))
    return tuple(groups)


def _sliding_layers(rule: Mapping[str, Any] | None, names: Names, config: Mapping[str, Any]) -> Sequence[bool]:
    """Returns for each layer whether a query sees only a window of tokens."""
    layers = range(names.sizes["layers"])
    if rule is None or names.switch(rule["window"]) is None or not names.switch(rule.get("enabled", True)):
        return [False for _ in layers]
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == len(layers):
        return [kind == "sliding_attention" for kind in types]
    flags = config.get(rule.get("zero_flags_key", ""))
    if isinstance(flags, list) and len(flags) == len(layers):
        return [not flag for flag in flags]
    if "first_layer" in rule:
        first = names.size(rule["first_layer"])
        return [layer >= first for layer in layers]
    if "all_but_every" in rule:
        every = names.size(rule["all_but_every"])
        return [(layer + 1) % every != 0 for layer in layers]
    if "only_every" in rule:
        every = names.size(rule["only_every"])
        return [(layer + 1) % every == 0 for layer in layers]
    return [True for _ in layers]


def _block(architecture: Mapping[str, Any], names: Names, *, slides: bool) -> Block:
    attention, mlp = architecture["attention"], architecture["mlp"]
    window = names.switch(attention["sliding"]["window"]) if slides else None
    return Block(
        layer_class=architecture["layer_class"],
        linears=tuple(_linear(entry, names) for entry in architecture["linears"]),
        norms=tuple(build_norm(entry, names) for entry in architecture["norms"]),
        attention=AttentionFacts(
            heads=names.sizes["heads"],
            kv_heads=names.sizes["kv_heads"],
            head_dim=names.sizes["head_dim"],
            sliding_window=window,
            logit_softcap=names.switch(attention.get("logit_softcap")),
            fused_qkv=attention["fused_qkv"],
        ),
        mlp=MlpFacts(
            intermediate=names.sizes["intermediate"],
            gated=mlp["gated"],
            fused_gate_up=mlp["fused_gate_up"],
            activation=names.switches["activation"],
        ),
        tensors=tuple(
            Tensor(name=entry["name"], component=Component(entry["component"]), params=names.size(entry["params"]))
            for entry in architecture.get("tensors", ())
        ),
    )


def _linear(entry: Mapping[str, Any], names: Names) -> Linear:
    return Linear(
        name=entry["name"],
        component=Component(entry["component"]),
        in_features=names.size(entry["in"]),
        out_features=names.size(entry["out"]),
        bias=bool(names.switch(entry["bias"])),
        reads=entry["reads"],
    )


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
