"""Two locks beside each other: what changed in what was asked, what is known and what came of it."""

from memc.comparison.compare import Change, Comparison, LineMove, Reading, SettingChange, compare_locks
from memc.comparison.locks import parse_lock, read_lock
from memc.comparison.prose import cause_lines, comparison_lines, ledger_lines
from memc.comparison.sides import Side, read_sides

__all__ = [
    "Change",
    "Comparison",
    "LineMove",
    "Reading",
    "SettingChange",
    "Side",
    "cause_lines",
    "compare_locks",
    "comparison_lines",
    "ledger_lines",
    "parse_lock",
    "read_lock",
    "read_sides",
]
