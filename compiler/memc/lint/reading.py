"""Text of files that nobody vouches for: read with limits, parsed into nodes that know where they stand.

Nothing is imported or executed. YAML arrives as events, one by one, so that neither nesting nor aliases of aliases cost
more than the limits allow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from memc.spec_source import Node, Position, joined_surrogates, scalar_value

MAX_BYTES = 1 << 20
"""Larger files are data, not configuration."""
MAX_NODES = 20_000
MAX_DEPTH = 48
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_START = Position(line=1, column=1)


class UnreadableError(Exception):
    """A text that is no YAML or JSON, or more of it than is read.

    Attributes:
        position: Where; line 0 when unknown.
    """

    def __init__(self, reason: str, position: Position) -> None:
        super().__init__(reason)
        self.position = position


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The top node of a text, and the keys that stand twice in a section (name, second place, first place)."""

    root: Node
    repeated: tuple[tuple[str, Position, Position], ...] = ()


def text_of(path: Path) -> str | None:
    """Returns the text of a regular file; None for what is no text, too large or not to be read."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError):
        return None
    if len(raw) > MAX_BYTES or b"\0" in raw:
        return None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None


def parse(text: str, *, strict_json: bool) -> Parsed:
    """Returns the first document of a text.

    Args:
        text: YAML or JSON.
        strict_json: Whether it must be JSON.

    Raises:
        UnreadableError: With the place.
    """
    if strict_json:
        _check_json(text)
    composer = _Composer()
    try:
        root = composer.first(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = Position(line=mark.line + 1, column=mark.column + 1) if mark else Position(line=0, column=0)
        problem = " ".join(part for part in (error.context, error.problem) if part)
        if strict_json:
            return Parsed(root=_without_places(text))
        raise UnreadableError("".join(c if c.isprintable() else " " for c in problem)[:200], position) from None
    except (yaml.YAMLError, ValueError, OverflowError, UnicodeError, RecursionError):
        if strict_json:
            return Parsed(root=_without_places(text))
        raise UnreadableError("it holds a character or number that YAML forbids", Position(line=0, column=0)) from None
    return Parsed(root=root, repeated=tuple(composer.repeated))


def _check_json(text: str) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableError(error.msg, Position(line=error.lineno, column=error.colno)) from None
    except (ValueError, RecursionError):
        raise UnreadableError("it is nested too deeply or holds too long a number", _START) from None


def _without_places(text: str) -> Node:
    """Returns the node of JSON that YAML does not take; everything is said to stand at its beginning."""
    try:
        return _plain(json.loads(text), [0], 0)
    except (ValueError, RecursionError):
        raise UnreadableError("it holds more than is read", _START) from None


def _plain(value: object, count: list[int], depth: int) -> Node:
    count[0] += 1
    if count[0] > MAX_NODES or depth > MAX_DEPTH:
        raise UnreadableError("it holds more than is read", _START)
    if isinstance(value, dict):
        keys = {str(name): (_START, _plain(inner, count, depth + 1)) for name, inner in value.items()}
        return Node(value=value, position=_START, keys=keys)
    if isinstance(value, list):
        return Node(value=value, position=_START, items=tuple(_plain(item, count, depth + 1) for item in value))
    return Node(value=value, position=_START)


class _Composer:
    """Builds nodes from events. A merge key takes over what it names; tags are passed over."""

    def __init__(self) -> None:
        self.repeated: list[tuple[str, Position, Position]] = []
        self._anchors: dict[str, Node] = {}
        self._count = 0

    def first(self, events: Iterator[yaml.Event]) -> Node:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                return self._node(next(events), events, 0)
        return Node(value=None, position=_START)

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Node:
        position = _position(event)
        if isinstance(event, yaml.AliasEvent):
            known = self._anchors.get(str(event.anchor))
            if known is None:
                raise UnreadableError("an alias names nothing that stands before it", position)
            node = Node(value=known.value, position=position, keys=known.keys, items=known.items, size=known.size)
        elif depth > MAX_DEPTH:
            raise UnreadableError(f"it is nested more than {MAX_DEPTH} deep", position)
        elif isinstance(event, yaml.MappingStartEvent):
            node = self._mapping(position, events, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._sequence(position, events, depth)
        else:
            assert isinstance(event, yaml.ScalarEvent)
            plain = not event.style and event.implicit[0]  # libyaml says "" where Python says None
            node = Node(value=scalar_value(event.value) if plain else joined_surrogates(event.value), position=position)
        self._count += 1
        if max(self._count, node.size) > MAX_NODES:
            raise UnreadableError(f"it holds more than {MAX_NODES:,} values", position)
        anchor = None if isinstance(event, yaml.AliasEvent) else getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[str(anchor)] = node
        return node

    def _sequence(self, position: Position, events: Iterator[yaml.Event], depth: int) -> Node:
        items: list[Node] = []
        size = 1
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self._node(event, events, depth + 1))
            size += items[-1].size
            self._limit(size, position)
        return Node(value=[item.value for item in items], position=position, items=tuple(items), size=size)

    def _mapping(self, position: Position, events: Iterator[yaml.Event], depth: int) -> Node:
        keys: dict[str, tuple[Position, Node]] = {}
        merged: dict[str, tuple[Position, Node]] = {}
        size = 1
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = self._node(event, events, depth + 1)
            value = self._node(next(events), events, depth + 1)
            size += key.size + value.size
            self._limit(size, position)
            name = key.value if isinstance(key.value, str) else str(key.value) if not key.keys and not key.items else ""
            if name == "<<":
                for taken in value.items or (value,):
                    merged = {**taken.keys, **merged}
                continue
            if name in keys:
                self.repeated.append((name, key.position, keys[name][0]))
            keys[name] = (key.position, value)
        keys = {**merged, **keys}
        return Node(
            value={name: node.value for name, (_, node) in keys.items()}, position=position, keys=keys, size=size
        )

    def _limit(self, size: int, position: Position) -> None:
        if size > MAX_NODES:
            raise UnreadableError(f"it holds more than {MAX_NODES:,} values", position)


def _position(event: yaml.Event) -> Position:
    mark = event.start_mark
    return Position(line=mark.line + 1, column=mark.column + 1) if mark else _START
