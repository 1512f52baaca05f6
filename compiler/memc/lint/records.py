"""What the lint reads and what it says: places, documents, remarks. Frozen, and without a file handle in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from memc.spec_source import Node, Position


class Kind(StrEnum):
    """What a file, or a part of one, is written for."""

    DEEPSPEED = "deepspeed"
    ACCELERATE = "accelerate"
    ADAPTER = "adapter"
    ARGUMENTS = "arguments"
    FSDP = "fsdp"
    QUANTIZATION = "quantization"
    MODEL = "model"
    LAUNCH = "launch"
    SLURM = "slurm"
    SCRIPT = "script"
    REQUIREMENTS = "requirements"


class Weight(StrEnum):
    """How much a remark weighs: an error stops or spoils the run, a warning may, a note says what to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place in a file; line and column are 1-based, 0 when unknown."""

    path: Path
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}" if self.line else str(self.path)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One recognised document.

    Attributes:
        kind: What reads it.
        path: The file.
        node: Its keys and values with their positions.
        dialect: Which of several forms: ``sft``, ``dpo`` (a class of TRL), ``axolotl``, ``llama-factory``; empty for
            the plain form of its kind.
        names: Files that it names, as written: another document may be meant.
        owner: The document that it is a part of (an ``fsdp_config`` in arguments); None for one of its own.
        extra: What its reader found besides keys and values.
    """

    kind: Kind
    path: Path
    node: Node
    dialect: str = ""
    names: tuple[str, ...] = ()
    owner: Document | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def place(self, *steps: str) -> Place:
        """Returns where the key at a path of keys stands; the nearest section that exists when it is not there."""
        node, position = self.node, self.node.position
        for step in steps:
            if step not in node.keys:
                break
            position, node = node.keys[step]
        return Place(path=self.path, line=position.line, column=position.column)

    def has(self, *steps: str) -> bool:
        """Whether a path of keys exists."""
        return self.find(*steps) is not None

    def find(self, *steps: str) -> Node | None:
        """Returns the node at a path of keys; None when it is not there."""
        node = self.node
        for step in steps:
            if step not in node.keys:
                return None
            node = node.keys[step][1]
        return node

    def value(self, *steps: str) -> Any:
        """Returns the value at a path of keys; None when it is not there."""
        node = self.find(*steps)
        return None if node is None else node.value


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A value that a document gives to something.

    Attributes:
        name: What it is about, in the words of the spec (``learning_rate``).
        value: It; texts such as ``auto`` never stand here.
        place: Where.
        key: The key, as the file spells it.
        default: Whether nobody wrote it: the library's default where the key could stand.
        kind: What the document is written for.
    """

    name: str
    value: Any
    place: Place
    key: str
    kind: Kind
    default: bool = False


@dataclass(frozen=True, kw_only=True)
class Remark:
    """One thing the lint says.

    Attributes:
        code: Id of the rule.
        weight: How much it weighs.
        message: One sentence.
        hint: The edit.
        place: Where.
        others: The other places that are in play.
    """

    code: str
    weight: Weight
    message: str
    hint: str
    place: Place
    others: tuple[Place, ...] = ()


def leaf(value: object, position: Position) -> Node:
    """Returns a node of a value without keys of its own."""
    return Node(value=value, position=position)


def section(keys: Mapping[str, tuple[Position, Node]], position: Position) -> Node:
    """Returns a node of keys and values."""
    return Node(
        value={name: node.value for name, (_, node) in keys.items()}, position=position, keys=dict(keys), size=len(keys)
    )


def words(text: str) -> frozenset[str]:
    """Returns the words of a text."""
    return frozenset(text.split())
