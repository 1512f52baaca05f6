"""Model families as data: an architecture file says how a config becomes linears, norms and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from memc.errors import Location, MemcError, usage_error
from memc.facts.documents import nearest, read_spec, spec_keys
from memc.facts.expressions import evaluate
from memc.facts.records import AttentionFacts, Block, BlockGroup, Component, Linear, MlpFacts, Norm, NormKind, Tensor

_FOLDER = "architectures"
_SIZES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab")


@dataclass(frozen=True, kw_only=True)
class Names:
    """What an architecture file's names stand for in one config.

    Attributes:
        sizes: Whole numbers, derived widths included.
        switches: Everything else that was read: booleans, text, caps, None.
    """

    sizes: dict[str, int]
    switches: dict[str, Any]

    def size(self, expression: str | int) -> int:
        """Returns the whole number of an expression over the sizes."""
        return evaluate(expression, self.sizes)

    def switch(self, value: Any) -> Any:
        """Returns `value`, or what it stands for when it is a name."""
        return self.switches[value] if isinstance(value, str) else value


def architecture_keys() -> tuple[str, ...]:
    """Returns the `model_type`s that have an architecture description, sorted."""
    return spec_keys(_FOLDER)


def ledger_described(model_type: str) -> bool:
    """Returns whether the closed forms of the ledger hold for this family (its parameter counts may do without)."""
    return model_type in architecture_keys() and bool(load_architecture(model_type)["ledger"])


@cache
def load_architecture(model_type: str) -> Mapping[str, Any]:
    """Returns the description of one family.

    Raises:
        MemcError: ``model-type-unknown`` naming the type, what is missing and the known types.
    """
    known = architecture_keys()
    if model_type not in known:
        close = nearest(model_type, known, count=1)
        guess = f" (nearest: {close[0]})" if close else ""
        raise usage_error(
            "model-type-unknown",
            f"model_type {model_type!r} has no architecture description{guess}; known: {', '.join(known)}",
            hint=f"choose a model of a known type, or describe its linears, norms and config keys in specs/{_FOLDER}",
        )
    return read_spec(_FOLDER, model_type)


def read_names(architecture: Mapping[str, Any], config: Mapping[str, Any], *, file: str) -> Names:
    """Returns what the names of an architecture file stand for in `config`.

    Args:
        architecture: The description.
        config: The parsed config.json.
        file: Path of the config, for errors.

    Raises:
        MemcError: ``model-config-missing-key`` for a needed key, ``model-config-bad-value`` for one that is no
            positive whole number; all of them together.
    """
    names = Names(sizes={}, switches={})
    problems: list[MemcError] = []
    for name, rule in architecture["config"].items():
        try:
            _read_name(name, rule, names, config, file)
        except MemcError as error:
            problems.append(error)
            if name in _SIZES:
                names.sizes[name] = 1  # so that what depends on it can still be checked
    if problems:
        raise MemcError(tuple(diagnostic for error in problems for diagnostic in error.diagnostics))
    for name, expression in architecture["widths"].items():
        names.sizes[name] = names.size(expression)
    return names


def _read_name(name: str, rule: Mapping[str, Any], names: Names, config: Mapping[str, Any], file: str) -> None:
    value = _raw_value(rule, names, config, file)
    if name in _SIZES and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise usage_error(
            "model-config-bad-value",
            f"{rule.get('key', name)} is {value!r} in {file}; it must be a positive whole number",
            where=Location(file=file, field=str(rule.get("key", name))),
            hint="pass the config.json that save_pretrained or the hub wrote",
        )
    if isinstance(value, int) and not isinstance(value, bool):
        names.sizes[name] = value
    names.switches[name] = value


def _raw_value(rule: Mapping[str, Any], names: Names, config: Mapping[str, Any], file: str) -> Any:
    key = rule["key"]
    value = config.get(key)
    if value is not None:
        return value
    if key in config and "if_null" in rule:
        default = rule["if_null"]
    elif "text_if_missing" in rule:
        return rule["text_if_missing"]
    elif "if_missing" in rule:
        default = rule["if_missing"]
    else:
        raise usage_error(
            "model-config-missing-key",
            f"{file} has no {key}",
            where=Location(file=file, field=key),
            hint=f"add {key} to the config, or pass the config.json that save_pretrained or the hub wrote",
        )
    return names.size(default) if isinstance(default, str) else default


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
