"""The shape of a rule: when it applies, in which versions, what is said and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any


class Severity(StrEnum):
    """An error is refused, a warning is said; what memc writes avoids what is handled."""

    ERROR = "error"
    WARNING = "warning"
    HANDLED = "handled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One condition on one value.

    Attributes:
        name: Which value.
        among: It must be one of these; empty when bounds decide.
        least, most: It must lie within; None leaves a side open.
        other_than: It must not be this; None when that plays no part.
    """

    __test__ = False  # pytest: no class of tests

    name: str
    among: tuple[Any, ...] = ()
    least: float | None = None
    most: float | None = None
    other_than: Any = None

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the value is there and passes."""
        value = values.get(self.name)
        if value is None:
            return False
        if self.among:
            return value in self.among
        if self.other_than is not None:
            return bool(value != self.other_than)
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One combination that bites.

    Attributes:
        id: Kebab-case name.
        severity: What becomes of it.
        when: All must hold.
        versions: Package to the range of versions that it concerns, for example ``>=0.17.6,<0.18.3``; a rule without
            any holds in all versions.
        sentence: What happens, with names of values in braces.
        fix: What to do, as an instruction.
        fields: Fields of a spec that can be in play, most telling first.
        source: Where it is known from.
        checked: ISO date.
        file_fix: What to do in files that somebody wrote by hand, where that differs; empty where it does not.
        file_severity: What becomes of it there, where that differs; None where it does not.
    """

    id: str
    severity: Severity
    when: tuple[Test, ...]
    versions: dict[str, str]
    sentence: str
    fix: str
    fields: tuple[str, ...]
    source: str
    checked: str
    file_fix: str = ""
    file_severity: Severity | None = None

    @property
    def code(self) -> str:
        """The id, as findings call it."""
        return self.id

    def concerns(self, versions: Mapping[str, str]) -> bool:
        """Whether every package that it names has a version in its range; an unknown version has not."""
        return all(name in versions and in_range(versions[name], span) for name, span in self.versions.items())


def in_range(version: str, span: str) -> bool:
    """Whether a version satisfies all clauses of a range (``>=``, ``>``, ``<=``, ``<``, ``==``, ``!=``).

    Only the numbers of a release count: 0.19.8+cu128 is 0.19.8.

    Raises:
        ValueError: When a clause has none of these operators.
    """
    return all(_satisfies(release_of(version), clause.strip()) for clause in span.split(","))


def _satisfies(release: tuple[int, ...], clause: str) -> bool:
    for operator in (">=", "<=", "==", "!=", ">", "<"):
        if clause.startswith(operator):
            bound = release_of(clause.removeprefix(operator))
            return {
                ">=": release >= bound,
                "<=": release <= bound,
                "==": release == bound,
                "!=": release != bound,
                ">": release > bound,
                "<": release < bound,
            }[operator]
    raise ValueError(f"{clause!r} is no version range")


@cache
def release_of(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, trailing zeros left out so that 1.0 equals 1."""
    numbers = []
    for part in version.strip().split("+")[0].split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
