"""Programs of blocks: the text of an architecture file, with the shared functions that it calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from memc.facts.architectures import Names
from memc.facts.documents import read_spec, spec_keys

_FOLDER = "operations"
_WORD = re.compile(r"[A-Za-z_]\w*")


@cache
def program_text(own: str, needed: str = "") -> str:
    """Returns a program that needs nothing else: `own` functions, and those of specs/operations that they call.

    Args:
        own: Functions of an architecture file; they take the place of shared ones of the same name.
        needed: A shared function that is wanted besides.
    """
    functions = _functions(own)
    wanted = sorted(_words(own) | _words(needed))
    found = dict(functions)
    while wanted:
        name = wanted.pop()
        if name in found or name not in _shared():
            continue
        found[name] = _shared()[name]
        wanted += _words(found[name])
    return "\n".join(found[name] for name in [*functions, *sorted(found.keys() - functions.keys())])


def program_sizes(text: str, names: Names, flags: Mapping[str, bool]) -> tuple[tuple[str, int], ...]:
    """Returns the sizes and switches (0 or 1) that a program mentions, and `hidden`, by name."""
    values: dict[str, int] = {name: int(bool(value)) for name, value in names.switches.items()}
    values |= names.sizes
    values |= {name: int(value) for name, value in flags.items()}
    wanted = (_words(text) | {"hidden"}) & values.keys() if text else ()
    return tuple(sorted((name, values[name]) for name in wanted))


@cache
def _words(text: str) -> frozenset[str]:
    """Returns every name in a program's text, comments left out."""
    return frozenset(word for line in text.splitlines() for word in _WORD.findall(line.split("#")[0]))


@cache
def _shared() -> dict[str, str]:
    """Returns the shared functions by name."""
    found: dict[str, str] = {}
    for key in spec_keys(_FOLDER):
        found |= _functions(read_spec(_FOLDER, key)["functions"])
    return found


def _functions(text: str) -> dict[str, str]:
    """Returns the text of each function of a program, by name."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("def "):
            name = line[len("def ") :].split("(")[0].strip()
            found[name] = ""
        if name and line.strip() and not line.lstrip().startswith("#"):
            found[name] += line.split(" #")[0].rstrip() + "\n"
    return found
