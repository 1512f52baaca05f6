"""Fields of a record, whatever they hold: text, numbers, and what cannot be read."""

from __future__ import annotations

import math
from typing import Any


class UnreadableError(Exception):
    """A record does not say what is needed; the message is the reason, without the record's own numbers."""


def text(value: Any) -> str:
    """Returns a field as text; empty for null."""
    return "" if value is None else str(value)


def number(value: Any) -> float | None:
    """Returns a field as a positive number; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if found > 0 and math.isfinite(found) else None


def whole(value: Any) -> int | None:
    """Returns a field as a positive whole number; None for anything else."""
    found = number(value)
    return None if found is None or found != int(found) else int(found)
