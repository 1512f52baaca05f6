"""The ledger beside published memory: what `make accuracy-memory ARGS='--write docs/accuracy-memory.yaml'` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pages.text import heading, table

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "accuracy-memory.yaml"
_COLUMNS = ("records", "median, signed", "median", "90 % within")


def memory_section() -> str:
    """Returns the ledger's errors by group, what was left out and why, and every miss with its explanation."""
    found: dict[str, Any] = yaml.safe_load(RESULTS.read_text(encoding="utf-8"))
    missed = "none" if not found["oom_called_fit"] else ", ".join(found["oom_called_fit"])
    parts = [
        f"{found['count']} of {found['eligible']} published figures of high confidence and a known metric are compared "
        f"({found['coverage']:.0%}), {found['models']} models. With every group of near-duplicates weighing the same, "
        f"the ledger is {found['median']:.1%} off in the median and {found['p90']:.1%} in nine of ten; with every "
        f"record weighing the same, {found['plain']['median']:.1%} and {found['plain']['p90']:.1%}. Of "
        f"{found['verdicts']} records that only say whether a run fitted its card, {found['verdicts_right']:.0%} "
        f"agree; out-of-memory runs that the ledger calls a fit: {missed}.\n"
    ]
    groups = [
        [name, row["records"], f"{row['signed']:+.1%}", f"{row['median']:.1%}", f"{row['p90']:.1%}"]
        for name, row in found["groups"].items()
    ]
    parts += [
        table(("group", *_COLUMNS), groups, _COLUMNS),
        heading(3, "Left out"),
        table(("reason", "records"), found["left_out"].items(), ("records",)),
        heading(3, "Off by more than 12 %"),
        table(
            ("record", "error", "why"), [[m["id"], f"{m['error']:+.0%}", m["why"]] for m in found["misses"]], ("error",)
        ),
    ]
    return "\n".join(parts)
