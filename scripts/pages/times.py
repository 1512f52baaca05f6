"""The clock beside published step times: what `make accuracy-time ARGS='--write docs/accuracy-time.yaml'` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pages.text import heading, table

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "accuracy-time.yaml"
_COLUMNS = ("rows", "median, signed", "median", "90 % within")


def times_section() -> str:
    """Returns the clock's errors by kind, what was left out and why, and the rows that it misses most."""
    found: dict[str, Any] = yaml.safe_load(RESULTS.read_text(encoding="utf-8"))
    parts = [
        f"{found['count']} of {found['eligible']} published step times and throughputs are compared "
        f"({found['coverage']:.0%}): the clock is {found['median']:.0%} off in the median and {found['p90']:.0%} in "
        f"nine of ten. Within a group of rows of one source, model and card it puts techniques in order with a rank "
        f"correlation of {found['rank_correlation']:.2f} in the median.\n"
    ]
    for kind, rows in found["kinds"].items():
        body = [
            [name, row["rows"], f"{row['signed']:+.0%}", f"{row['median']:.0%}", f"{row['p90']:.0%}"]
            for name, row in rows.items()
        ]
        parts.append(table((kind, *_COLUMNS), body, _COLUMNS))
    parts += [heading(3, "Left out"), table(("reason", "rows"), found["left_out"].items(), ("rows",))]
    worst = [
        [
            row["id"],
            f"{row['predicted_seconds'] / row['measured_seconds'] - 1:+.0%}",
            row["measured_seconds"],
            row["predicted_seconds"],
            "; ".join(row["assumed"]) or "nothing: a term is missing or differs",
        ]
        for row in found["worst"]
    ]
    numeric = ("error", "measured, s", "predicted, s")
    parts += [heading(3, "Farthest off"), table(("row", *numeric, "assumed"), worst, numeric)]
    return "\n".join(parts)
