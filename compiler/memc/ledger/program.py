"""The language that blocks are written in: functions of tensors, read into records."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

_SYMBOLS = "()+-*/,=<>:"
_INDENT = 4


@dataclass(frozen=True, slots=True)
class Expression:
    """A number, a name, or an operation on expressions.

    Attributes:
        kind: ``number``, ``name`` or ``call``.
        text: The name, or the operation.
        number: The number.
        arguments: What the operation is given.
    """

    kind: str
    text: str = ""
    number: int = 0
    arguments: tuple[Expression, ...] = ()


@dataclass(frozen=True, slots=True)
class Statement:
    """One line: an assignment (or an expression whose value is dropped), a `return`, an `if`, a `for each` or a `del`.

    Attributes:
        kind: ``set``, ``return``, ``if``, ``each`` or ``del``.
        targets: Names that are given the value, or deleted.
        value: What is computed; the condition of an `if`; positions of a piece in a `for each`; None for a `del`.
        body: Statements of an `if` or a `for each`.
        otherwise: Statements of its `else`.
    """

    kind: str
    targets: tuple[str, ...]
    value: Expression | None
    body: tuple[Statement, ...] = ()
    otherwise: tuple[Statement, ...] = ()


@dataclass(frozen=True, slots=True)
class Function:
    """A function: its locals live until they are given another value, deleted, or it returns."""

    name: str
    parameters: tuple[str, ...]
    body: tuple[Statement, ...]


class ProgramError(ValueError):
    """A program that cannot be read or run; the text says which line and why."""


@cache
def parse_program(text: str) -> dict[str, Function]:
    """Returns the functions of a program, by name.

    Raises:
        ProgramError: With the line, when the text is not in the language.
    """
    lines = [(number, line.rstrip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line.split(" #")[0].rstrip()) for number, line in lines]
    rest = [(number, line) for number, line in lines if line.strip() and not line.strip().startswith("#")]
    functions: dict[str, Function] = {}
    while rest:
        number, line = rest.pop(0)
        words = _words(line, number)
        if words[:1] != ["def"] or words[-2:] != [")", ":"] or len(words) < 5 or words[2] != "(":
            raise ProgramError(f"line {number}: expected 'def name(parameters):', found {line.strip()!r}")
        parameters = tuple(word for word in words[3:-2] if word != ",")
        functions[words[1]] = Function(words[1], parameters, _block(rest, _INDENT))
    return functions


def _block(rest: list[tuple[int, str]], indent: int) -> tuple[Statement, ...]:
    """Takes the statements that are indented by `indent` spaces from the head of `rest`."""
    found: list[Statement] = []
    while rest:
        number, line = rest[0]
        depth = len(line) - len(line.lstrip(" "))
        if depth < indent:
            break
        if depth > indent:
            raise ProgramError(f"line {number}: unexpected indent")
        rest.pop(0)
        found.append(_statement(_words(line, number), rest, indent, number))
    if not found:
        raise ProgramError("a function or an if without statements")
    return tuple(found)


def _statement(words: list[str], rest: list[tuple[int, str]], indent: int, number: int) -> Statement:
    if words[0] in ("if", "elif"):
        condition = _whole(words[1:-1], number)
        body = _block(rest, indent + _INDENT)
        return Statement("if", (), condition, body, _otherwise(rest, indent))
    if words[:2] == ["for", "each"]:
        return Statement("each", (), _whole(words[2:-1], number), _block(rest, indent + _INDENT))
    if words[0] == "return":
        return Statement("return", (), _tuple(words[1:], number))
    if words[0] == "del":
        return Statement("del", tuple(word for word in words[1:] if word != ","), None)
    if "=" in words:
        at = words.index("=")
        targets = tuple(word for word in words[:at] if word != ",")
        return Statement("set", targets, _tuple(words[at + 1 :], number))
    return Statement("set", (), _whole(words, number))


def _otherwise(rest: list[tuple[int, str]], indent: int) -> tuple[Statement, ...]:
    if rest and rest[0][1].startswith(" " * indent + "elif "):
        number, line = rest.pop(0)
        return (_statement(_words(line, number), rest, indent, number),)
    if rest and rest[0][1] == " " * indent + "else:":
        rest.pop(0)
        return _block(rest, indent + _INDENT)
    return ()


def _words(line: str, number: int) -> list[str]:
    words: list[str] = []
    current = ""
    for character in line:
        if character in _SYMBOLS or character == " ":
            if current:
                words.append(current)
            current = ""
            if character != " ":
                words.append(character)
        elif character.isalnum() or character == "_":
            current += character
        else:
            raise ProgramError(f"line {number}: {character!r} is not part of the language")
    if current:
        words.append(current)
    return words


def _tuple(words: list[str], number: int) -> Expression:
    """Returns one expression, or several between commas as a ``tuple``."""
    first, rest = _condition(words, number)
    values = [first]
    while rest and rest[0] == ",":
        value, rest = _condition(rest[1:], number)
        values.append(value)
    if rest:
        raise ProgramError(f"line {number}: unexpected {rest[0]!r}")
    return first if len(values) == 1 else Expression("call", "tuple", 0, tuple(values))


def _whole(words: list[str], number: int) -> Expression:
    value, rest = _condition(words, number)
    if rest:
        raise ProgramError(f"line {number}: unexpected {rest[0]!r}")
    return value


def _condition(words: list[str], number: int) -> tuple[Expression, list[str]]:
    left, rest = _negation(words, number)
    while rest and rest[0] in ("and", "or"):
        word = rest[0]
        right, rest = _negation(rest[1:], number)
        left = Expression("call", word, 0, (left, right))
    return left, rest


def _negation(words: list[str], number: int) -> tuple[Expression, list[str]]:
    if words and words[0] == "not":
        value, rest = _negation(words[1:], number)
        return Expression("call", "not", 0, (value,)), rest
    left, rest = _sum(words, number)
    if rest and rest[0] in ("<", ">"):
        right, tail = _sum(rest[1:], number)
        return Expression("call", rest[0], 0, (left, right)), tail
    return left, rest


def _sum(words: list[str], number: int) -> tuple[Expression, list[str]]:
    left, rest = _product(words, number)
    while rest and rest[0] in ("+", "-"):
        word = rest[0]
        right, rest = _product(rest[1:], number)
        left = Expression("call", word, 0, (left, right))
    return left, rest


def _product(words: list[str], number: int) -> tuple[Expression, list[str]]:
    left, rest = _atom(words, number)
    while rest and rest[0] in ("*", "/"):
        word = rest[0]
        right, rest = _atom(rest[1:], number)
        left = Expression("call", word, 0, (left, right))
    return left, rest


def _atom(words: list[str], number: int) -> tuple[Expression, list[str]]:
    if not words or (words[0] in _SYMBOLS and words[0] != "("):
        raise ProgramError(f"line {number}: expected a value, found {words[0] if words else 'nothing'!r}")
    word, rest = words[0], words[1:]
    if word == "(":
        value, rest = _condition(rest, number)
        if not rest or rest[0] != ")":
            raise ProgramError(f"line {number}: a parenthesis is not closed")
        return value, rest[1:]
    if word.isdigit():
        return Expression("number", "", int(word)), rest
    if not rest or rest[0] != "(":
        return Expression("name", word), rest
    arguments: list[Expression] = []
    rest = rest[1:]
    while rest and rest[0] != ")":
        value, rest = _condition(rest, number)
        arguments.append(value)
        if rest and rest[0] == ",":
            rest = rest[1:]
    if not rest:
        raise ProgramError(f"line {number}: a parenthesis is not closed")
    return Expression("call", word, 0, tuple(arguments)), rest[1:]
