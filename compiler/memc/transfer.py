"""Transfer: frozen records as JSON that names their types, and back; how facts reach the what-if part of a page."""

from __future__ import annotations

from enum import Enum
from typing import Any

from memc import config
from memc.clock import constants as clock_constants
from memc.facts import records
from memc.ledger import constants as ledger_constants

_TYPE = "type"
_HOMES = {"config": config, "facts": records, "ledger": ledger_constants, "clock": clock_constants}


def pack(value: Any) -> Any:
    """Returns `value` JSON-ready: records and enums carry the name of their type, tuples become lists.

    Raises:
        TypeError: When a record or enum is none of the types that `unpack` knows.
    """
    if isinstance(value, Enum):
        return {_TYPE: _known(type(value)), "value": value.value}
    if isinstance(value, tuple):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        return {"type": "dict", "items": [[key, pack(item)] for key, item in value.items()]}
    if hasattr(value, "__dataclass_fields__"):
        return {_TYPE: _known(type(value)), **{name: pack(getattr(value, name)) for name in value.__dataclass_fields__}}
    return value


def unpack(document: Any) -> Any:
    """Returns the value that `pack` was given; lists become tuples."""
    if isinstance(document, list):
        return tuple(unpack(item) for item in document)
    if not isinstance(document, dict):
        return document
    name = document[_TYPE]
    if name == "dict":
        return {key: unpack(item) for key, item in document["items"]}
    home, _, own = name.partition(".")
    kind = getattr(_HOMES[home], own)
    return kind(**{key: unpack(item) for key, item in document.items() if key != _TYPE})


def _known(kind: type) -> str:
    """Returns the name of a type with that of its home: two homes may have a type of one name."""
    for name, home in _HOMES.items():
        if getattr(home, kind.__name__, None) is kind:
            return f"{name}.{kind.__name__}"
    raise TypeError(f"{kind.__name__} is no record that can be transferred")
