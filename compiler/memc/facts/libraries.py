"""Library facts: sourced numbers about frameworks, links and machine parts, by dotted key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from memc.errors import Location, usage_error
from memc.facts.documents import nearest, read_spec, require_sourced, spec_keys
from memc.facts.records import Fact

_FOLDERS = ("libraries", "links")
_READ: ContextVar[dict[str, Fact] | None] = ContextVar("memc_facts_read", default=None)


@contextmanager
def facts_read() -> Iterator[dict[str, Fact]]:
    """Gives a dictionary that fills with every fact `load_fact` returns until the block ends, by key."""
    found: dict[str, Fact] = {}
    token = _READ.set(found)
    try:
        yield found
    finally:
        _READ.reset(token)


def fact_keys() -> tuple[str, ...]:
    """Returns the dotted keys of all library and link facts, sorted; reads every such file."""
    keys = []
    for folder in _FOLDERS:
        for file in spec_keys(folder):
            keys += [f"{file}.{name}" for name in _facts(folder, file)]
    return tuple(sorted(keys))


def load_fact(key: str) -> Fact:
    """Returns the fact called ``<file>.<name>``, for example ``deepspeed.reduce_bucket_elements``.

    Raises:
        MemcError: ``fact-unknown`` with the nearest keys, ``fact-unsourced``.
    """
    file, _, name = key.partition(".")
    for folder in _FOLDERS:
        if file in _files(folder):
            facts = _facts(folder, file)
            if name in facts:
                entry = facts[name]
                require_sourced(entry, name=f"{folder}/{file}.yaml", field=name)
                fact = Fact(key=key, value=entry["value"], source=entry["source"], checked=entry["checked"])
                if (found := _READ.get()) is not None:
                    found[key] = fact
                return fact
    close = nearest(key, fact_keys())
    guess = f"; nearest: {', '.join(close)}" if close else ""
    raise usage_error("fact-unknown", f"no fact is called {key!r}{guess}", where=Location(field=key))


@cache
def _files(folder: str) -> tuple[str, ...]:
    return spec_keys(folder)


@cache
def _facts(folder: str, file: str) -> dict[str, Any]:
    facts: dict[str, Any] = read_spec(folder, file)["facts"]
    return facts
