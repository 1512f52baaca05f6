"""The fields of a spec: type, limits, default and the sentence of each, read from the spec's own model."""

from __future__ import annotations

from typing import Any

from memc.spec import Spec
from memc.spec_errors import field_paths
from memc.spec_sentences import add_sentences

from pages.text import heading, table

_SIZE = "size with unit, for example `22GiB`"
_PATTERNS = {"[KMGT": _SIZE, "none|": "duration, money or `none`, for example `24h` or `$40`"}


def spec_fields() -> tuple[str, ...]:
    """Returns the dotted path of every field that holds a value."""
    return tuple(field_paths(Spec))


def fields_section() -> str:
    """Returns a table for the top of the spec and one for each of its sections."""
    add_sentences()
    schema, defaults = Spec.model_json_schema(), _defaults()
    top, parts = {}, []
    for name, field in schema["properties"].items():
        section = _section(schema, field)
        if section is None:
            top[name] = field
            continue
        parts.append(heading(2, f"`{name}` {{ #{name} }}"))
        parts.append(f"{Spec.model_fields[name].description}{_required(schema, name)}\n")
        parts.append(_rows(section["properties"], f"{name}.", section.get("required", []), schema, defaults[name]))
    return "\n".join([heading(2, "Top of the spec"), _rows(top, "", schema["required"], schema, defaults), *parts])


def _required(schema: dict[str, Any], name: str) -> str:
    return " Required." if name in schema["required"] else " Optional."


def _section(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any] | None:
    target = _resolved(schema, field)
    return target if "properties" in target else None


def _resolved(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    reference = field.get("$ref") or (field.get("allOf") or [{}])[0].get("$ref")
    target: dict[str, Any] = schema["$defs"][reference.rpartition("/")[2]] if reference else field
    return target


def _defaults() -> dict[str, Any]:
    """Returns every field of a spec that says no more than it must."""
    return Spec.model_validate({"model": "m", "data": {"max_length": 1}, "hardware": {"gpu": "g"}}).resolved()


def _rows(
    fields: dict[str, Any], prefix: str, required: list[str], schema: dict[str, Any], defaults: dict[str, Any]
) -> str:
    rows = []
    for name, field in fields.items():
        default = "required" if name in required else _default(defaults[name])
        rows.append([f"`{prefix}{name}`", _type(schema, field), default, field.get("description", "")])
    return table(["field", "type", "default", "what it says"], rows)


def _default(value: object) -> str:
    if value is None:
        return "not set"
    if value == []:
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(schema: dict[str, Any], field: dict[str, Any]) -> str:
    """Returns the type of a field in words, with its limits."""
    field = _resolved(schema, field)
    if "anyOf" in field or "oneOf" in field:
        options = [_type(schema, option) for option in field.get("anyOf") or field["oneOf"]]
        return " or ".join(dict.fromkeys(option for option in options if option != "null"))
    if "enum" in field:
        return " · ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    for part, words in _PATTERNS.items():
        if part in field.get("pattern", ""):
            return words
    if field.get("type") == "array":
        return f"list of {_type(schema, field['items'])}"
    types = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    kind = str(field.get("type", "value"))
    name = types.get(kind, kind)
    return name + _limits(field) if field.get("type") in ("integer", "number") else name


def _limits(field: dict[str, Any]) -> str:
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    shown = [f"{sign} {field[key]:,}" for key, sign in limits.items() if key in field]
    return f", {' and '.join(shown)}" if shown else ""
