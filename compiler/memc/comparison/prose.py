"""A comparison as lines for people."""

from __future__ import annotations

from collections.abc import Iterable

from memc.comparison.compare import Change, Comparison, LineMove, Reading
from memc.comparison.swaps import fact_lines, value_text
from memc.units import format_gib, format_seconds

MAX_LINES = 40


def cause_lines(found: Comparison) -> list[str]:
    """Returns one line for each thing that goes into a plan and changed: memc, spec, library versions, facts."""
    lines = [f"memc: {found.memc.before} -> {found.memc.after}"] if found.memc else []
    lines += [f"spec field {change_text(change)}" for change in found.spec]
    lines += [f"library version {change_text(change)}" for change in found.versions]
    return lines + fact_lines(found.facts)


def ledger_lines(moves: Iterable[LineMove], *, most: int = MAX_LINES) -> list[str]:
    """Returns one line per ledger line that moved, and how many are not shown."""
    every = list(moves)
    lines = [move_text(move) for move in every[:most]]
    if len(every) > most:
        lines.append(f"and {len(every) - most} more")
    return lines


def move_text(move: LineMove) -> str:
    """Returns ``+0.84 GiB  gpu activations layer-checkpoints: 2.00 GiB -> 2.84 GiB``; small sizes in bytes."""
    where = "" if move.at_peak else " (not at the peak)"
    return (
        f"{_signed(move.change_bytes)}  {move.resource} {move.account} {move.name}: "
        f"{_size(move.before_bytes)} -> {_size(move.after_bytes)}{where}"
    )


def change_text(change: Change) -> str:
    """Returns ``key: before -> after``."""
    return f"{change.key}: {value_text(change.before)} -> {value_text(change.after)}"


def peak_text(peak: Reading) -> str:
    """Returns what a resource needs, before and after, with the difference."""
    name = peak.key.removesuffix("_bytes").replace(".", " ")
    if not isinstance(peak.before, int) or not isinstance(peak.after, int):
        return f"{name}: {value_text(peak.before)} -> {value_text(peak.after)}"
    if not peak.moved:
        return f"{name}: {_size(peak.after)}, unchanged"
    return f"{name}: {_size(peak.before)} -> {_size(peak.after)} ({_signed(peak.after - peak.before)})"


def comparison_lines(found: Comparison) -> list[str]:
    """Returns everything that changed: peaks, time and money, ledger lines, settings, what led to it."""
    lines = [peak_text(peak) for peak in found.peaks if peak.moved or peak.key == "gpu.required_bytes"]
    lines += [_clock_text(reading) for reading in found.clock if {reading.before, reading.after} != {None}]
    lines += _section("ledger lines that move", ledger_lines(found.lines))
    settings = [f"{change_text(change)}  [{change.touch}]" for change in found.settings]
    lines += _section("settings that change", settings)
    lines += _section("what led to it", cause_lines(found))
    if not found.facts_recorded:
        lines += ["", "one side does not record the facts it was made with"]
    if not (found.explained or found.lines or found.settings or any(r.moved for r in (*found.peaks, *found.clock))):
        lines += ["", "no difference"]
    return lines


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _clock_text(reading: Reading) -> str:
    name = {"step_seconds": "time per step", "total_seconds": "time of the run", "total_usd": "money"}[reading.key]
    before, after = (_amount(reading.key, value) for value in (reading.before, reading.after))
    return f"{name}: {before} -> {after}" if reading.moved else f"{name}: {after}, unchanged"


def _amount(key: str, value: float | int | str | None) -> str:
    if not isinstance(value, int | float):
        return "unknown"
    return f"${value:.2f}" if key == "total_usd" else format_seconds(value)


def _size(size_bytes: int) -> str:
    return f"{size_bytes} B" if abs(size_bytes) < 10**6 else format_gib(size_bytes)


def _signed(size_bytes: int) -> str:
    return f"+{_size(size_bytes)}" if size_bytes > 0 else _size(size_bytes)
