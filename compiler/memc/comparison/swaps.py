"""Changed facts as lines: one card or model for another is one line, whatever is known of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from memc.comparison.compare import Change
from memc.facts.records import GpuFacts, ModelFacts, Stack

_THINGS = {"gpus": "card", "models": "model"}
_FIELDS = frozenset(field.name for record in (GpuFacts, ModelFacts, Stack) for field in fields(record)) | {
    "blocks",
    "params",
}
_SHOWN_FIGURES = 6
_SHOWN_NAMES = 4
_MAX_VALUE = 72


def value_text(value: Any) -> str:
    """Returns a value of spec, plan or facts for display, at most 72 characters."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown if len(shown) <= _MAX_VALUE else shown[: _MAX_VALUE - 3] + "..."


def fact_lines(facts: Sequence[Change]) -> list[str]:
    """Returns a line for each fact that changed; those of a thing that another took the place of share one.

    Facts that only one of two plans rests on are named together, without their values.
    """
    lines, rest = [], list(facts)
    for folder, word in _THINGS.items():
        gone, come = (_things(rest, folder, before=before) for before in (True, False))
        if len(gone) == len(come) == 1:
            lines.append(_swap(rest, word, folder, gone.pop(), come.pop()))
            rest = [change for change in rest if not change.key.startswith(f"{folder}.")]
    changed = [change for change in rest if change.before is not None and change.after is not None]
    lines += [f"fact {change.key}: {value_text(change.before)} -> {value_text(change.after)}" for change in changed]
    for word, names in (
        ("no longer rests on", [change.key for change in rest if change.after is None]),
        ("rests on", [change.key for change in rest if change.before is None]),
    ):
        if names:
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            lines.append(f"the plan {word} {', '.join(names[:_SHOWN_NAMES])}{more}")
    return lines


def _things(facts: Sequence[Change], folder: str, *, before: bool) -> set[str]:
    """Returns the keys in a folder of specs of which one side knows something and the other nothing."""
    sides: dict[str, list[Any]] = {}
    for change in facts:
        parts = change.key.split(".")
        if parts[0] == folder:  # a model's key may hold dots: it ends where a field begins
            end = next((at for at, part in enumerate(parts) if at > 1 and part in _FIELDS), len(parts))
            sides.setdefault(".".join(parts[1:end]), []).append(change.after if before else change.before)
    return {key for key, values in sides.items() if all(value is None for value in values)}


def _swap(facts: Sequence[Change], word: str, folder: str, gone: str, come: str) -> str:
    """Returns what differs between two things of one kind, the first figures with their values."""
    old, new = (_figures(facts, f"{folder}.{key}.", before=key == gone) for key in (gone, come))
    names = [name for name in old if name in new and old[name] != new[name] and name != "checked"]
    names.sort(key=lambda name: (name.count("."), not _figure(old[name])[0].isdigit()))
    shown = [f"{name} {_figure(old[name])} -> {_figure(new[name])}" for name in names[:_SHOWN_FIGURES]]
    more = f" and {len(names) - _SHOWN_FIGURES} more" if len(names) > _SHOWN_FIGURES else ""
    return f"{word} {gone} -> {come}: {', '.join(shown) or 'no figure differs'}{more}"


def _figures(facts: Sequence[Change], prefix: str, *, before: bool) -> dict[str, Any]:
    """Returns what one side knows of a thing, by name."""
    mine = [change for change in facts if change.key.startswith(prefix)]
    return {change.key.removeprefix(prefix): change.before if before else change.after for change in mine}


def _figure(value: Any) -> str:
    """Returns a value for display; of a long number, four digits."""
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return "unknown" if value in (None, "None") else value_text(value)
