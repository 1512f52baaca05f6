"""Model families as data: what the names of an architecture file stand for in one config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from memc.errors import Location, MemcError, usage_error
from memc.facts.documents import nearest, read_spec, spec_keys
from memc.facts.expressions import evaluate

_FOLDER = "architectures"
_REAL_CONFIG = "pass the config.json that save_pretrained or the hub wrote"
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

    def holds(self, entry: Mapping[str, Any], flags: Mapping[str, bool]) -> bool:
        """Returns whether an entry with ``when`` and ``unless`` belongs to a layer.

        Args:
            entry: The entry; each of its conditions is a name or a list of names.
            flags: What holds for the layer; other names are switches of the config, or sizes, which hold unless 0.
        """

        def true(name: str) -> bool:
            known = flags if name in flags else self.switches if name in self.switches else self.sizes
            return bool(known[name])

        return all(true(name) for name in _listed(entry.get("when"))) and not any(
            true(name) for name in _listed(entry.get("unless"))
        )


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


def read_names(
    architecture: Mapping[str, Any], config: Mapping[str, Any], *, file: str, parts: Mapping[str, Names] | None = None
) -> Names:
    """Returns what the names of an architecture file stand for in `config`.

    Args:
        architecture: The description.
        config: The parsed config.json, or the part of it that the description is about.
        file: Path of the config, for errors.
        parts: Names of the parts that a composed model is made of; they are known here as ``part_name``.

    Raises:
        MemcError: ``model-config-missing-key`` for a needed key, ``model-config-bad-value`` for one that is no
            positive whole number; all of them together.
    """
    names = Names(sizes={}, switches={})
    for part, known in (parts or {}).items():
        names.sizes.update({f"{part}_{name}": size for name, size in known.sizes.items()})
        names.switches.update({f"{part}_{name}": value for name, value in known.switches.items()})
    problems: list[MemcError] = []
    for name, rule in architecture["config"].items():
        try:
            _read_name(name, rule, names, config, file)
        except MemcError as error:
            problems.append(error)
            if name in _SIZES:
                names.sizes[name] = 1  # so that what depends on it can still be checked
    if not problems:
        for requirement in architecture.get("requires", ()):
            _check_requirement(requirement, architecture, names, file)
    if problems:
        raise MemcError(tuple(diagnostic for error in problems for diagnostic in error.diagnostics))
    for name, expression in architecture.get("widths", {}).items():
        names.sizes[name] = names.size(expression)
    return names


def _read_name(name: str, rule: Mapping[str, Any], names: Names, config: Mapping[str, Any], file: str) -> None:
    value = _raw_value(rule, names, config, file)
    if name in _SIZES and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        key = (_keys(rule) or [name])[0]
        raise usage_error(
            "model-config-bad-value",
            f"{key} is {value!r} in {file}; it must be a positive whole number",
            where=Location(file=file, field=key),
            hint=_REAL_CONFIG,
        )
    if isinstance(value, int):
        names.sizes[name] = int(value)  # a switch counts as 0 or 1
    elif rule.get("per_mille"):
        names.sizes[name] = round(1000 * value)
    names.switches[name] = value


def _raw_value(rule: Mapping[str, Any], names: Names, config: Mapping[str, Any], file: str) -> Any:
    """Returns what a rule of an architecture's `config` section gives: the key's value, a default or a constant."""
    if "constant" in rule:
        return names.size(rule["constant"])
    if "constant_text" in rule:
        return rule["constant_text"]
    value = _value_or_default(rule, names, config, file)
    if "one_of" in rule:
        return value in rule["one_of"]
    if "above" in rule:
        return isinstance(value, int) and value > rule["above"]
    if "texts" in rule:
        return rule["texts"].get(value, value)
    if "length_of" in rule and isinstance(config.get(rule["length_of"]), dict | list):
        return len(config[rule["length_of"]])
    if rule.get("square") and isinstance(value, list) and len(set(value)) == 1:
        return value[0]
    return value


def _value_or_default(rule: Mapping[str, Any], names: Names, config: Mapping[str, Any], file: str) -> Any:
    keys = _keys(rule)
    present = [key for key in keys if key in config]
    values = [config[key] for key in present if config[key] is not None]
    if values:
        return values[0]
    if present and "if_null" in rule:
        default = rule["if_null"]
    elif "text_if_missing" in rule:
        return rule["text_if_missing"]
    elif "if_missing" in rule:
        default = rule["if_missing"]
    else:
        raise usage_error(
            "model-config-missing-key",
            f"{file} has no {' or '.join(keys)}",
            where=Location(file=file, field=keys[0]),
            hint=f"add {keys[0]} to the config, or {_REAL_CONFIG}",
        )
    return names.size(default) if isinstance(default, str) else default


def _keys(rule: Mapping[str, Any]) -> list[str]:
    """Returns the config keys of a rule, in order of preference; empty for a constant."""
    return _listed(rule.get("key"))


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def unpriced(architecture: Mapping[str, Any], names: Names) -> str:
    """Returns why the ledger's closed forms do not hold for a config, as the end of a sentence; empty when they do."""
    if not architecture["ledger"]:
        return str(architecture.get("why_unpriced", "its activations are not described yet"))
    for requirement in architecture.get("ledger_requires", ()):
        wanted = _wanted(requirement, names)
        value = names.switches[requirement["name"]]
        if value != wanted:
            key = _keys(architecture["config"][requirement["name"]])[0]
            return f"its activations are described for {key} = {wanted!r} only, and it has {value!r}"
    return ""


def _wanted(requirement: Mapping[str, Any], names: Names) -> Any:
    """Returns the value that a requirement asks for."""
    equals = requirement.get("equals")
    return names.size(equals) if isinstance(equals, str) else requirement.get("equals_text", equals)


def _check_requirement(
    requirement: Mapping[str, Any], architecture: Mapping[str, Any], names: Names, file: str
) -> None:
    """Checks that a config stays within what the architecture file describes.

    Raises:
        MemcError: ``model-config-unsupported`` when it does not.
    """
    name = requirement["name"]
    value = names.switches[name]
    if requirement.get("empty"):
        wanted: Any = []
        fits = not value
    else:
        wanted = _wanted(requirement, names)
        fits = value == wanted
    if not fits:
        key = _keys(architecture["config"][name])[0]
        raise usage_error(
            "model-config-unsupported",
            f"{file} sets {key} to {value!r}; the {architecture['model_type']} description covers only {wanted!r}",
            where=Location(file=file, field=key),
            hint=f"choose another model, or extend specs/{_FOLDER}/{architecture['model_type']}.yaml",
        )
