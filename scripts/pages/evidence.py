"""Which grades of evidence this version can produce, by looking at its commands."""

from __future__ import annotations

from memc.ledger.entries import Grade

from pages.commands import command_names
from pages.text import table

_COMMANDS = {Grade.ESTIMATED: "explain", Grade.TRACED: "trace", Grade.REHEARSED: "rehearse", Grade.MEASURED: "verify"}
_HOW = {
    Grade.ESTIMATED: "closed forms over the facts of model and card; no torch",
    Grade.TRACED: "the real modelling code takes one step on tensors without data; every storage is followed",
    Grade.REHEARSED: "the emitted folder runs on a stand-in for the GPU",
    Grade.MEASURED: "the emitted folder runs on the card; torch's and the driver's counters are read",
}


def evidence_table() -> str:
    """Returns the grades, how each is made, and the command for it in this version."""
    names = command_names()
    rows = []
    for grade in Grade:
        command = _COMMANDS[grade]
        here = f"[`memc {command}`](../reference/commands.md#{command})" if command in names else "no command yet"
        rows.append([grade.value, _HOW[grade], here])
    return table(["grade", "how", "in this version"], rows)
