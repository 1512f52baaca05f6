"""The text of a spec as YAML nodes that know where they stand. Reads a safe subset of YAML, with limits.

PyYAML only delivers events here; what they mean is decided below, by the rules of YAML 1.2: ``on`` and ``no`` are text,
``1:30`` is text, ``2e-4`` is a number. Tags, merge keys and repeated keys are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from memc.errors import Diagnostic, Location, MemcError, usage_error

MAX_BYTES = 256 * 1024
MAX_NODES = 2_000
MAX_PROBLEMS = 50
MAX_DEPTH = 16
MAX_DIGITS = 1000
SHOWN_COLUMNS = 110

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_PREFIXED_INT = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_SYNTAX_HINTS = (
    ("'\\t'", "indent with spaces; YAML does not allow tabs there"),
    ("mapping values are not allowed", "put quotes around a value that holds a colon followed by a space"),
    ("cannot start any token", "put quotes around a value that begins with @, ` or %"),
    ("while scanning an alias", "put quotes around a value that begins with *"),
    ("while scanning an anchor", "put quotes around a value that begins with &"),
    ("expected ',' or ']'", "close the list with ] and separate its items with commas"),
    ("expected ',' or '}'", "close the section with } and separate its keys with commas"),
    ("quoted scalar", "close the quotes; inside double quotes write a backslash as \\\\"),
    ("expected ':'", "write `key: value`, with a space after the colon"),
    ("block", "give keys of the same section the same indentation"),
)


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in the text, 1-based, columns in characters."""

    line: int
    column: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """One YAML node.

    Attributes:
        value: What it means: None, bool, int, float, str, list or dict (of the values below).
        position: Where it begins.
        keys: Position of the key and value node, by key; empty when it is not a mapping.
        items: Nodes of a list; empty otherwise.
        size: Nodes in it with every alias written out.
    """

    value: object
    position: Position
    keys: dict[str, tuple[Position, Node]] = field(default_factory=dict)
    items: tuple[Node, ...] = ()
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed text.

    Attributes:
        file: Name that diagnostics show.
        lines: Its lines.
        root: Its top node.
        problems: What was refused without stopping the reading (repeated keys, tags).
    """

    file: str
    lines: tuple[str, ...]
    root: Node
    problems: tuple[Diagnostic, ...]

    def find(self, path: tuple[str | int, ...], *, key: bool = False) -> tuple[Position, tuple[str | int, ...]]:
        """Returns the position of the node at `path`, and how much of the path exists in the text.

        Args:
            path: Keys and list indices from the top.
            key: Whether the position of the last key is wanted rather than that of its value.
        """
        node, position = self.root, self.root.position
        for depth, step in enumerate(path):
            if isinstance(step, str) and step in node.keys:
                key_position, node = node.keys[step]
                last = depth == len(path) - 1
                position = key_position if key and last else node.position
            elif isinstance(step, int) and step < len(node.items):
                node = node.items[step]
                position = node.position
            else:
                return (path_owner_position(self.root, path[:depth]) or position), path[:depth]
        return position, path


def path_owner_position(root: Node, path: tuple[str | int, ...]) -> Position | None:
    """Returns the position of the key that names the section at `path`; None at the top or in a list."""
    node, position = root, None
    for step in path:
        if isinstance(step, str) and step in node.keys:
            position, node = node.keys[step]
        elif isinstance(step, int) and step < len(node.items):
            node = node.items[step]
            position = node.position
    return position


def source_lines(lines: tuple[str, ...], position: Position) -> tuple[str, ...]:
    """Returns the line at `position` and a caret under its column, as context of a diagnostic."""
    if not 1 <= position.line <= len(lines):
        return ()
    start = max(0, position.column - SHOWN_COLUMNS * 2 // 3)
    line = lines[position.line - 1][start : start + SHOWN_COLUMNS]
    shown = "".join(char if char.isprintable() else " " for char in line).rstrip()
    return (shown, " " * (position.column - 1 - start) + "^") if shown.strip() else ()


def split_lines(text: str) -> tuple[str, ...]:
    """Returns the lines of `text`, broken where YAML breaks them."""
    return tuple(_LINE_BREAK.split(text))


def read_text(path: Path) -> str:
    """Returns the text of the spec at `path`, without byte order mark.

    Raises:
        MemcError: When it cannot be read, is too large or is not UTF-8.
    """
    where = Location(file=str(path))
    try:
        if path.is_dir():
            raise usage_error(
                "spec-is-a-folder", f"{path} is a folder, not a spec", where=where, hint="name the spec file inside it"
            )
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise usage_error(
            "spec-not-found",
            f"there is no file {path}",
            where=where,
            hint="check the path, or write a first spec with `memc init`",
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise usage_error(
            "spec-unreadable", f"{path} cannot be read: {reason}", where=where, hint="make the file readable"
        ) from None
    if len(raw) > MAX_BYTES:
        raise _too_large(str(path))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        looks = ", it looks like UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise usage_error(
            "spec-not-utf8",
            f"{path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}{looks}",
            where=where,
            hint="save the file as UTF-8",
        ) from None


def parse_document(text: str, file: str) -> Document:
    """Returns `text` as nodes.

    Raises:
        MemcError: When the text is not YAML, is empty, is not a mapping, or passes the limits on size and depth.
    """
    text = text.removeprefix("\ufeff")
    if len(text) > MAX_BYTES:
        raise _too_large(file)
    composer = _Composer(text, file)
    root = composer.compose()
    if root is None or root.value is None:
        raise usage_error(
            "spec-empty",
            f"{file} holds no keys",
            where=Location(file=file),
            hint="write at least `model`, `data` and `hardware`, or let `memc init` write a first spec",
        )
    if not isinstance(root.value, dict):
        kind = "a list" if isinstance(root.value, list) else "a single value"
        raise MemcError(
            (composer.problem("spec-not-a-mapping", f"the top of a spec must be a mapping of keys, got {kind}",
                              root.position, hint="begin with `model: ...`"),)
        )  # fmt: skip
    return Document(file=file, lines=composer.lines, root=root, problems=tuple(composer.problems))


def scalar_value(text: str) -> bool | int | float | str | None:
    """Returns what an unquoted scalar means: null, boolean, number or text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", "")) if len(text) <= MAX_DIGITS else float("-inf" if text[0] == "-" else "inf")
    if _PREFIXED_INT.fullmatch(text) and len(text) <= MAX_DIGITS:
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def joined_surrogates(text: str) -> str:
    r"""Returns `text` with pairs such as ``\ud83d\ude00`` (how JSON spells it) joined; lone ones stay as they are."""
    if not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _too_large(file: str) -> MemcError:
    return usage_error(
        "spec-too-large",
        f"{file} is larger than {MAX_BYTES // 1024} KiB, which no spec needs to be",
        where=Location(file=file),
        hint="name a spec, not a data file",
    )


class _Composer:
    """Builds nodes from PyYAML's events."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.lines = split_lines(text)
        self._count = 0
        self.file = file
        self.problems: list[Diagnostic] = []
        self._anchors: dict[str, Node] = {}
        self._events = self._checked_events()

    def problem(self, code: str, message: str, position: Position, hint: str = "", name: str = "") -> Diagnostic:
        """Returns a diagnostic that points into the text."""
        where = Location(file=self.file, line=position.line, column=position.column, field=name)
        return Diagnostic(
            code=code, message=message, where=where, context=source_lines(self.lines, position), hint=hint
        )

    def _note(self, problem: Diagnostic) -> None:
        """Keeps a problem and reads on; gives up when there are too many."""
        self.problems.append(problem)
        if len(self.problems) >= MAX_PROBLEMS:
            raise MemcError(tuple(self.problems))

    def compose(self) -> Node | None:
        """Returns the top node of the only document; None when there is none."""
        root = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise MemcError(
                        (self.problem("spec-many-documents", "the file holds more than one YAML document",
                                      _position(event), hint="keep one spec per file; remove the `---` line"),)
                    )  # fmt: skip
                root = self._node(next(self._events), 0)
        return root

    def _checked_events(self) -> Iterator[yaml.Event]:
        try:
            yield from yaml.parse(self.text, Loader=yaml.SafeLoader)
        except yaml.reader.ReaderError as error:
            before = split_lines(self.text[: error.position])
            position = Position(line=len(before), column=len(before[-1]) + 1)
            character = error.character if isinstance(error.character, int) else ord(error.character[:1])
            message = f"the character U+{character:04X} is not allowed in YAML"
            raise self._stop("spec-yaml-character", message, position, "remove the character") from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            position = Position(line=mark.line + 1, column=mark.column + 1) if mark else Position(line=1, column=1)
            problem = " ".join(part for part in (error.context, error.problem) if part)
            problem = "".join(char if char.isprintable() else " " for char in problem)[:300]
            hint = next((hint for part, hint in _SYNTAX_HINTS if part in problem), "correct the YAML at this place")
            raise self._stop("spec-yaml-syntax", f"this is not YAML: {problem}", position, hint) from None
        except (ValueError, OverflowError):
            message = "this is not YAML: an escape or a directive holds a number that is out of range"
            position = Position(line=1, column=1)
            raise self._stop("spec-yaml-syntax", message, position, "correct the escape or the directive") from None

    def _stop(self, code: str, message: str, position: Position, hint: str) -> MemcError:
        return MemcError((*self.problems, self.problem(code, message, position, hint)))

    def _node(self, event: yaml.Event, depth: int) -> Node:
        self._count += 1
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if depth > MAX_DEPTH:
            message = f"sections are nested more than {MAX_DEPTH} deep"
            raise self._stop("spec-too-deep", message, _position(event), "a spec needs two levels; flatten it")
        if getattr(event, "tag", None) is not None:
            message = f"YAML tags are refused, got {shown_text(str(event.tag))}"  # type: ignore[attr-defined]
            self._note(self.problem("spec-yaml-tag", message, _position(event), "write the value without the tag"))
        if isinstance(event, yaml.MappingStartEvent):
            node = self._mapping(event, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._sequence(event, depth)
        else:
            assert isinstance(event, yaml.ScalarEvent)
            plain = event.style is None and event.implicit[0]
            value = scalar_value(event.value) if plain else joined_surrogates(event.value)
            node = Node(value=value, position=_position(event))
        if max(node.size, self._count) > MAX_NODES:
            message = f"the spec has more than {MAX_NODES:,} values, counting each alias as what it stands for"
            raise self._stop("spec-too-many-values", message, node.position, "a spec needs about fifty; shorten it")
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = node
        return node

    def _alias(self, event: yaml.AliasEvent) -> Node:
        anchor = str(event.anchor)
        if anchor not in self._anchors:
            message = f"the alias *{shown_text(anchor)[1:-1]} names no anchor that ends before it"
            hint = "put quotes around a value that begins with *"
            raise self._stop("spec-yaml-alias", message, _position(event), hint)
        known = self._anchors[anchor]
        return Node(value=known.value, position=_position(event), keys=known.keys, items=known.items, size=known.size)

    def _sequence(self, start: yaml.Event, depth: int) -> Node:
        items: list[Node] = []
        size = 1
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
            size += items[-1].size
        return Node(value=[item.value for item in items], position=_position(start), items=tuple(items), size=size)

    def _mapping(self, start: yaml.Event, depth: int) -> Node:
        keys: dict[str, tuple[Position, Node]] = {}
        size = 1
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            value = self._node(next(self._events), depth + 1)
            size += key.size + value.size
            if self._key_accepted(key, keys):
                keys[str(key.value)] = (key.position, value)
        values = {key: node.value for key, (_, node) in keys.items()}
        return Node(value=values, position=_position(start), keys=keys, size=size)

    def _key_accepted(self, key: Node, seen: dict[str, tuple[Position, Node]]) -> bool:
        """Returns whether the key may be used; notes a problem when not."""
        if not isinstance(key.value, str):
            what = "a section or list" if key.keys or key.items else shown_value(key.value)
            message, hint = f"a key must be text, got {what}", "write a known key, without ? and not as a number"
            self._note(self.problem("spec-key-not-text", message, key.position, hint))
        elif key.value == "<<":
            message, hint = "merge keys (<<) are not supported", "write the keys out"
            self._note(self.problem("spec-merge-key", message, key.position, hint))
        elif key.value in seen:
            first = seen[key.value][0]
            message = f"the key {shown_text(key.value)} stands twice in the same section, first on line {first.line}"
            self._note(self.problem("spec-repeated-key", message, key.position, "remove one of the two"))
        else:
            return True
        return False


def shown_text(text: str) -> str:
    """Returns `text` in double quotes for a message: at most 60 characters, nothing unprintable."""
    short = text if len(text) <= 60 else text[:57] + "..."
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in short)
    return f'"{safe}"'


def shown_value(value: object) -> str:
    """Returns what was got, for a message: ``the text "on"``, ``the number 3``, ``true``, ``a list``, ``nothing``."""
    if value is None:
        return "no value"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        if isinstance(value, int) and abs(value) >= 10**21:
            return f"a number of {len(str(abs(value)))} digits"
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {shown_text(value)}"
    return "a list" if isinstance(value, list | tuple) else "a section"


def _position(event: yaml.Event) -> Position:
    mark = event.start_mark
    return Position(line=mark.line + 1, column=mark.column + 1) if mark else Position(line=1, column=1)
