"""Finding the few places of a log that matter, in logs of any size, and cleaning them for reading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

BEFORE_BYTES = 48 * 1024
AFTER_BYTES = 6 * 1024
MAX_PLACES = 40
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PREFIX = re.compile(
    r"^\s*(?:\[?(?:default|rank|Rank )?\d*\]?:?\s*)?\[rank\d+\]:\s?|^\[\d+\]:\s?|^\(\w+ pid=\d+[^)]*\)\s?"
)
_SHOWN = 240
_PARTS = re.compile(rb"[^\r]+")  # a progress bar draws itself again after each carriage return
_EMPTY = cast("re.Match[bytes]", re.match(b"", b""))


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """A piece of a log around one place.

    Attributes:
        lines: Cleaned lines: no colours, no carriage returns, no rank prefix.
        numbers: 1-based line of each in the log.
        at: Index of the line where the place is.
        rank: The prefix of that line, for example ``[rank0]:``; empty without one.
    """

    lines: tuple[str, ...]
    numbers: tuple[int, ...]
    at: int
    rank: str

    def message(self, length: int = 3000) -> str:
        """Returns the text from the place on, on one line (a terminal or an editor may have wrapped it)."""
        return " ".join(" ".join(self.lines[self.at :]).split())[:length]

    def before(self) -> tuple[str, ...]:
        """Returns the lines before the place."""
        return self.lines[: self.at]

    def quote(self, index: int) -> tuple[int, str]:
        """Returns number and text of one line, shortened."""
        text = self.lines[index].strip()
        return self.numbers[index], text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def places(data: bytes, needles: Iterable[bytes]) -> list[int]:
    """Returns where any of `needles` stands in `data`, in order; the first and the last of each when there are many."""
    found: set[int] = set()
    for needle in needles:
        at, of_this = data.find(needle), 0
        while at >= 0 and of_this < MAX_PLACES:
            found.add(at)
            of_this += 1
            at = data.find(needle, at + len(needle))
        if at >= 0:
            found.add(data.rfind(needle))
    return sorted(found)


def excerpts(data: bytes, at: Iterable[int]) -> Iterator[Excerpt]:
    """Yields the surroundings of each place of `data`."""
    counted, line = 0, 1
    for place in at:
        start = data.rfind(b"\n", 0, max(0, place - BEFORE_BYTES)) + 1
        end = data.find(b"\n", min(len(data), place + AFTER_BYTES))
        line += data.count(b"\n", counted, start) if start >= counted else -data.count(b"\n", start, counted)
        counted = start
        yield _excerpt(data[start : end if end >= 0 else place + AFTER_BYTES], place - start, line)


def _excerpt(piece: bytes, place: int, first: int) -> Excerpt:
    lines: list[str] = []
    numbers: list[int] = []
    at, rank, base = 0, "", 0
    for number, raw in enumerate(piece.split(b"\n"), first):
        for part in _PARTS.finditer(raw) if raw.strip(b"\r") else [_EMPTY]:
            text = _ESCAPES.sub("", part.group().decode("utf-8", "replace"))
            prefix = _PREFIX.match(text)
            if base + part.start() <= place < base + part.end():
                at, rank = len(lines), prefix.group().strip() if prefix else ""
            shown = text[prefix.end() :] if prefix else text
            lines.append("".join(char if char.isprintable() or char == "\t" else " " for char in shown))
            numbers.append(number)
        base += len(raw) + 1
    return Excerpt(lines=tuple(lines), numbers=tuple(numbers), at=at, rank=rank)
