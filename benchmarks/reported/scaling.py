"""A config of a family with other dimensions: as a report states them, the rest as its parameters leave it."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from memc.facts.architectures import load_architecture
from memc.facts.models import model_from_config
from memc.facts.stacks import describe

_WIDTHS = ("intermediate", "dense_inner", "encoder_inner", "expert_inner", "shared_inner")
_HEADS = (("heads", "kv_heads"), ("encoder_heads", ""))
_NEAR = 0.002
_STEPS = 40
_MULTIPLE = 8


def scaled(config: Mapping[str, Any], stated: Mapping[str, int], wanted: float) -> dict[str, Any] | None:
    """Returns a config of the same family with stated dimensions; None for a family that is composed of others.

    Without a stated width or depth, all widths grow alike. What is left of the parameters is made up by the inner
    width of the experts or of the MLP, or by the depth where the family ties that to the hidden width. Heads keep
    their width.

    Args:
        config: A config.json of the family.
        stated: Whole numbers by name: ``layers``, ``hidden``, ``vocab``, ``experts``.
        wanted: Parameters; 0 when they are not stated.
    """
    architecture = load_architecture(str(config["model_type"]))
    if "parts" in architecture:
        return None
    rules = architecture["config"]
    sizes = _sizes(config)
    made, dimensions = dict(config), dict(stated)
    if wanted and "hidden" not in stated and "layers" not in stated:
        factor = sqrt(wanted / _params(config))
        width = sizes["hidden"] // sizes["heads"]
        dimensions |= {name: int(factor * sizes[name]) // 64 * 64 for name in _WIDTHS if name in sizes}
        dimensions["hidden"] = max(1, round(factor * sizes["hidden"] / width)) * width
    for name, value in dimensions.items():
        _set(made, rules, name, value)
    _drop_lists(made, sizes["layers"])
    _set_heads(made, rules, sizes)
    return _fitted(made, rules, stated, wanted) if wanted else made


def _set_heads(made: dict[str, Any], rules: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    width = sizes.get("head_dim") or sizes["hidden"] // sizes["heads"]
    hidden = _sizes(made)["hidden"]
    for heads, keys in _HEADS:
        if heads not in sizes:
            continue
        count = max(1, hidden * sizes[heads] // sizes["hidden"])
        _set(made, rules, heads, count)
        if keys in sizes:
            _set(made, rules, keys, _sharers(count, count * sizes[keys] / sizes[heads]))
    _set(made, rules, "head_dim", width)


def _sharers(heads: int, wanted: float) -> int:
    """Returns the number of key heads next to one that is wanted which heads can share evenly."""
    return min((keys for keys in range(1, heads + 1) if heads % keys == 0), key=lambda keys: abs(keys - wanted))


def _fitted(made: dict[str, Any], rules: Mapping[str, Any], stated: Mapping[str, int], wanted: float) -> dict[str, Any]:
    """Returns a config whose free dimension is such that its parameters are near those wanted."""
    lever = next((name for name in ("expert_inner", "intermediate", "layers") if _key(made, rules, name)), "layers")
    unit = 1 if lever == "layers" else _MULTIPLE
    if lever in stated:
        return made
    for _ in range(_STEPS):
        size, params = _sizes(made)[lever], _params(made)
        if abs(params / wanted - 1) <= _NEAR:
            break
        more = dict(made)
        _set(more, rules, lever, size + unit)
        slope = (_params(more) - params) / unit
        step = round((wanted - params) / slope / unit) * unit if slope else 0
        if not step:
            break
        _set(made, rules, lever, max(unit, size + step))
    return made


def _key(config: Mapping[str, Any], rules: Mapping[str, Any], name: str) -> str | None:
    """Returns the config key of a name; None when no key decides it."""
    keys = rules.get(name, {}).get("key") or []
    listed = [keys] if isinstance(keys, str) else list(keys)
    return next((key for key in listed if key in config), listed[0] if listed else None)


def _set(config: dict[str, Any], rules: Mapping[str, Any], name: str, value: int) -> None:
    key = _key(config, rules, name)
    if key is not None:
        config[key] = value


def _drop_lists(config: dict[str, Any], layers: int) -> None:
    """Takes out what names each layer of another depth."""
    for key in [key for key, value in config.items() if isinstance(value, list) and len(value) == layers]:
        del config[key]


def _sizes(config: Mapping[str, Any]) -> Mapping[str, int]:
    return describe(config, str(config["model_type"]), file="config.json").names.sizes


def _params(config: Mapping[str, Any]) -> int:
    return model_from_config(config, key="made", file="config.json", source="scaled", checked="").total_params
