"""A configuration read back from its settings, as a lock or a collection of measurements holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from memc.config import TrainingConfig
from memc.document import record_document


def config_of(settings: Mapping[str, Any]) -> TrainingConfig:
    """Returns the configuration that settings describe; those with a default may be left out.

    Raises:
        KeyError, TypeError, ValueError: When they describe none.
    """
    found = _read(TrainingConfig, settings)
    assert isinstance(found, TrainingConfig)
    return found


def settings_of(config: TrainingConfig) -> dict[str, Any]:
    """Returns the settings of a configuration, without those that are at their default."""
    return _without_defaults(config)


def _without_defaults(record: Any) -> dict[str, Any]:
    document = record_document(record)
    kept = {}
    for item in fields(record):
        value = getattr(record, item.name)
        if item.default is not MISSING and value == item.default:
            continue
        kept[item.name] = _without_defaults(value) if hasattr(value, "__dataclass_fields__") else document[item.name]
    return kept


def _read(kind: Any, value: Any) -> Any:
    """Returns a value of a type; numbers, text and switches must be of their type."""
    if get_origin(kind) is UnionType:
        options = [option for option in get_args(kind) if option is not NoneType]
        return None if value is None else _read(options[0], value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{value!r} is no list")
        return tuple(_read(get_args(kind)[0], item) for item in value)
    if hasattr(kind, "__dataclass_fields__"):
        hints = get_type_hints(kind)
        present = [item.name for item in fields(kind) if item.name in value or item.default is MISSING]
        return kind(**{name: _read(hints[name], value[name]) for name in present})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
