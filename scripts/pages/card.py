"""Ledger, trace and clock beside one card: what `benchmarks/accuracy_card.py --trace --write` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pages.text import table

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "accuracy-h200.yaml"
_KINDS = {
    "allocated": "allocated peak, ledger",
    "traced_allocated": "allocated peak, trace",
    "reserved": "reserved peak, ledger",
    "traced_reserved": "reserved peak, trace",
    "certified_reserved": "reserved peak, as `memc compile` certifies what fits",
    "seconds": "step time, clock",
}
_NUMBERS = ("median", "90 % within", "worst")
_COLUMNS = ("allocated, GiB", "ledger", "reserved, GiB", "trace", "step, s", "clock")


def card_section() -> str:
    """Returns the errors by figure, the verdicts, and every case."""
    found: dict[str, Any] = yaml.safe_load(RESULTS.read_text(encoding="utf-8"))
    shown = _names(found["false_fits"] + found["false_refusals"])
    certified = _names(found["certified_false_fits"])
    refused = _names(found["certified_refusals"])
    errors = [
        [said, *(f"{found[kind][name]:.2%}" for name in ("median", "p90", "worst"))]
        for kind, said in _KINDS.items()
        if kind in found
    ]
    parts = [
        f"{found['cases']} configurations: {found['measured']} ran, {found['out_of_memory']} ran out of memory. "
        f"Verdicts of the ledger alone that the card contradicts: {shown}. With the trace, which `memc compile` "
        f"certifies with: {certified} that it calls a fit ran out of memory; {refused} ran and would not be written, "
        "for torch had to give back what it had cached, or the reserve was used up. Outside the allocator it held "
        f"{found['context_bytes'] / 2**20:.0f} MiB in the median.\n",
        table(("figure", *_NUMBERS), errors, _NUMBERS),
        table(("case", *_COLUMNS), [_row(row) for row in found["rows"]], _COLUMNS),
    ]
    parts += [f"Not compared, {why}: {', '.join(cases)}.\n" for why, cases in found["not_compared"].items()]
    return "\n".join(parts)


def _names(cases: list[str]) -> str:
    return ", ".join(f"`{name.replace('_', ' ')}`" for name in cases) or "none"


def _row(row: dict[str, Any]) -> list[object]:
    ran = row["allocated_bytes"] is not None
    if not ran:
        return [row["case"], "out of memory", f"{_gib(row['priced_allocated_bytes'])} GiB", None, None, None, None]
    return [
        row["case"],
        _gib(row["allocated_bytes"]),
        f"{row['priced_allocated_bytes'] / row['allocated_bytes'] - 1:+.2%}",
        _gib(row["reserved_bytes"]),
        f"{row['traced_reserved_bytes'] / row['reserved_bytes'] - 1:+.2%}" if row["traced_reserved_bytes"] else None,
        f"{row['seconds']:.3f}",
        f"{row['priced_seconds'] / row['seconds'] - 1:+.0%}",
    ]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
