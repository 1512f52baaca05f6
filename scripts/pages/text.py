"""Small pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def cell(value: object) -> str:
    """Returns a value as the text of a table cell: one line, bars escaped, None as a dash."""
    text = "-" if value is None else "yes" if value is True else "no" if value is False else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], numeric: Sequence[str] = ()) -> str:
    """Returns a table; columns named in `numeric` are aligned to the right."""
    rule = ["---:" if column in numeric else "---" for column in columns]
    lines = [columns, rule, *([cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def heading(level: int, text: str) -> str:
    """Returns a heading."""
    return f"{'#' * level} {text}\n"


def fenced(text: str, language: str = "text") -> str:
    """Returns text as a code block; the fence is longer than any in the text."""
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}\n"
