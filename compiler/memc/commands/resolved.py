"""What `memc explain --resolved` prints."""

from __future__ import annotations

import json

import click

from memc.driver import Answer
from memc.resolution import ResolvedValue, resolution, resolution_document
from memc.units import format_gib

_VALUE_WIDTH = 32


def print_resolved(answer: Answer, as_json: bool) -> None:
    """Prints every field of the spec with its value and where that comes from.

    As JSON: the resolved spec, and beside its keys `resolution`, the list of the fields.
    """
    values = resolution(answer.loaded, answer.result)
    if as_json:
        document = {**answer.loaded.spec.resolved(), "resolution": resolution_document(values)}
        click.echo(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))
        return
    rows = [("field", "value", "from", "why"), *(_row(item) for item in values)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip())


def _row(item: ResolvedValue) -> tuple[str, str, str, str]:
    if item.field.startswith("memory.") and isinstance(item.value, int):
        return item.field, format_gib(item.value), item.origin.value, item.reason
    shown = "-" if item.value is None else item.value if isinstance(item.value, str) else json.dumps(item.value)
    short = shown if len(shown) <= _VALUE_WIDTH else shown[: _VALUE_WIDTH - 3] + "..."
    safe = "".join(char if char.isprintable() else " " for char in short)
    return item.field, safe, item.origin.value, item.reason
