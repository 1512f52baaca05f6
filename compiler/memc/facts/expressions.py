"""Arithmetic over named sizes, as architecture files write it: ``query + 2 * key``, ``hidden / heads``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left // right,
}


def evaluate(expression: str | int, names: Mapping[str, int]) -> int:
    """Returns the whole number that `expression` stands for; `/` divides whole numbers, rounding down.

    Raises:
        ValueError: When it holds anything but numbers, known names, ``+ - * /`` and parentheses.
    """
    if isinstance(expression, int):
        return expression
    return _value(_parsed(expression), names, expression)


@cache
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _value(node: ast.expr, names: Mapping[str, int], text: str) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, names, text), _value(right, names, text))
    raise ValueError(f"cannot evaluate {text!r} with the names {', '.join(sorted(names))}")
