"""The rules of specs/rules, read once."""

from __future__ import annotations

from functools import cache
from typing import Any

from memc.errors import Location, usage_error
from memc.facts.documents import read_spec, require_sourced, spec_keys
from memc.rules.records import Rule, Severity, Test

_FOLDER = "rules"
COMBINATIONS = "combinations"
"""The file of rules that configurations of memc's own can break; the others are about files written by hand."""


@cache
def load_rules(*files: str) -> tuple[Rule, ...]:
    """Returns the rules of some files of specs/rules, of all without any, in their order.

    Raises:
        MemcError: ``fact-unsourced`` for a rule without source or date, ``rule-malformed`` for one that cannot be read.
    """
    found = []
    for file in files or spec_keys(_FOLDER):
        for key, record in read_spec(_FOLDER, file)["rules"].items():
            require_sourced(record, name=f"{_FOLDER}/{file}.yaml", field=key)
            try:
                found.append(_rule(key, record))
            except (KeyError, ValueError, TypeError) as error:
                where = Location(file=f"specs/{_FOLDER}/{file}.yaml", field=key)
                raise usage_error("rule-malformed", f"the rule {key} cannot be read: {error}", where=where) from error
    return tuple(found)


def _rule(key: str, record: dict[str, Any]) -> Rule:
    return Rule(
        id=key,
        severity=Severity(record["severity"]),
        when=tuple(_test(name, value) for name, value in record["when"].items()),
        versions=dict(record.get("versions") or {}),
        sentence=record["sentence"],
        fix=record["fix"],
        fields=tuple(record["fields"]),
        source=record["source"],
        checked=record["checked"],
        file_fix=record.get("file_fix", ""),
        file_severity=Severity(record["file_severity"]) if "file_severity" in record else None,
    )


def _test(name: str, value: Any) -> Test:
    if isinstance(value, dict):
        unknown = value.keys() - {"least", "most", "not"}
        if unknown:
            raise ValueError(f"{name} is tested by {', '.join(sorted(unknown))}")
        return Test(name=name, least=value.get("least"), most=value.get("most"), other_than=value.get("not"))
    return Test(name=name, among=tuple(value) if isinstance(value, list) else (value,))
