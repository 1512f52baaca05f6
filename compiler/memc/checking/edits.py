"""What differs between a generated file and what memc writes: as a unified diff, and by the keys that changed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_ASSIGNED = re.compile(r"""\s*(?:export\s+)?["']?([A-Za-z_][\w.-]*)["']?\s*(?:=|:\s)\s*(.*?)\s*,?\s*$""")
_ABSENT = "nothing"
_SHOWN_CHARACTERS = 72


@dataclass(frozen=True, kw_only=True)
class KeyEdit:
    """One key of a generated file whose value is not the one that memc writes.

    Attributes:
        key: Dotted in JSON and YAML, else the name on the line.
        found, written: Value in the file and value that memc writes, as text.
        line: Line of the file, 1-based; 0 when unknown.
    """

    key: str
    found: str
    written: str
    line: int

    def __str__(self) -> str:
        return f"{_shown(self.key)} is {_shown(self.found)}, memc writes {_shown(self.written)}"


def _shown(text: str) -> str:
    """Returns at most 72 characters of `text`, nothing unprintable."""
    safe = "".join(char if char.isprintable() else " " for char in text)
    return safe if len(safe) <= _SHOWN_CHARACTERS else f"{safe[: _SHOWN_CHARACTERS - 3]}..."


def unified_diff(path: Path, found: bytes | None, written: str | None) -> str:
    """Returns the diff that makes the file what memc writes, ending with LF; empty when there is none.

    Args:
        path: The file, for the headers.
        found: What is there; None when nothing is.
        written: What memc writes; None when it writes no such file.
    """
    old = [] if found is None else _with_ends(found.decode("utf-8", "replace"))
    new = [] if written is None else _with_ends(written)
    names = ("/dev/null" if found is None else str(path), "/dev/null" if written is None else str(path))
    lines = difflib.unified_diff(old, new, *names)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _with_ends(text: str) -> list[str]:
    """Returns the lines of `text` with their LF; nothing else ends a line."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1].removesuffix("\n")
    return lines if lines[-1] else lines[:-1]


def first_changed_line(found: bytes, written: str) -> int:
    """Returns the first line of the file, 1-based, that differs from what memc writes."""
    old, new = _with_ends(found.decode("utf-8", "replace")), _with_ends(written)
    same = next((index for index, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
    return max(1, min(len(old), (min(len(old), len(new)) if same is None else same) + 1))


def key_edits(name: str, found: bytes, written: str) -> list[KeyEdit]:
    """Returns the keys whose values differ, in the order of the file; empty when no key can be told.

    JSON and YAML are compared as documents; anything else line by line where a line assigns something.
    """
    text = found.decode("utf-8", "replace")
    if name.endswith((".json", ".yaml", ".yml")):
        return _document_edits(name, text, written)
    return _line_edits(text, written)


def _document_edits(name: str, text: str, written: str) -> list[KeyEdit]:
    try:
        old, new = (_leaves(_parsed(name, side)) for side in (text, written))
    except (ValueError, yaml.YAMLError, RecursionError):
        return []
    keys = [key for key in {**old, **new} if old.get(key, _ABSENT) != new.get(key, _ABSENT)]
    return [
        KeyEdit(key=key, found=old.get(key, _ABSENT), written=new.get(key, _ABSENT), line=_line_of(key, text))
        for key in keys
    ]


def _parsed(name: str, text: str) -> Any:
    return json.loads(text) if name.endswith(".json") else yaml.load(text, Loader=_LOADER)  # a safe loader


def _leaves(value: Any, prefix: str = "") -> dict[str, str]:
    """Returns the leaves of nested mappings by dotted key, as JSON text; lists are leaves."""
    if isinstance(value, dict) and value:
        leaves: dict[str, str] = {}
        for key, inner in value.items():
            leaves |= _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
        return leaves
    return {prefix or "the document": json.dumps(value, ensure_ascii=False, default=str)}


def _line_of(key: str, text: str) -> int:
    last = key.rpartition(".")[2]
    pattern = re.compile(rf"""^\s*(?:-\s+)?["']?{re.escape(last)}["']?\s*:""")
    lines = [number for number, line in enumerate(text.split("\n"), start=1) if pattern.match(line)]
    return lines[0] if len(lines) == 1 else 0


def _line_edits(text: str, written: str) -> list[KeyEdit]:
    old, new = text.split("\n"), written.split("\n")
    return [edit for block in _changed_blocks(old, new) for edit in _block_edits(old, new, *block)]


def _changed_blocks(old: list[str], new: list[str]) -> Iterator[tuple[int, int, int, int]]:
    for tag, *block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            yield block[0], block[1], block[2], block[3]


def _block_edits(old: list[str], new: list[str], i1: int, i2: int, j1: int, j2: int) -> list[KeyEdit]:
    found = {match[1]: (match[2], i1 + n + 1) for n, line in enumerate(old[i1:i2]) if (match := _ASSIGNED.match(line))}
    written = {match[1]: match[2] for line in new[j1:j2] if (match := _ASSIGNED.match(line))}
    edits = []
    for key in {**found, **written}:
        value, line = found.get(key, (_ABSENT, min(i1 + 1, len(old))))
        if value != written.get(key, _ABSENT):
            edits.append(KeyEdit(key=key, found=value, written=written.get(key, _ABSENT), line=line))
    return edits
