"""Versions that a folder asks for: requirements files, options, what is installed, what memc plans with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from memc.facts import load_fact
from memc.lint.records import Document, Kind, Place, leaf, section
from memc.lint.settings import versions_read
from memc.rules.records import in_range, release_of
from memc.spec_source import Position

_LINE = re.compile(r"\s*(?P<name>[A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*(?P<span>(?:[~=!<>]=?=?)[^;#@]*)?(?:[;#].*)?$")
_QUOTED = re.compile(r"""["'](?P<name>[A-Za-z][\w-]*)(?:\[[^\]]*\])?(?P<span>\s*(?:[~=!<>][^"';]*)?)[^"']*["']""")
PACKAGES = ("transformers", "trl", "accelerate", "peft", "deepspeed", "bitsandbytes", "torch")


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version of a package, and how it is known.

    Attributes:
        text: The version.
        told: ``as requirements.txt asks``, ``given``, ``installed`` or ``the one memc plans with``.
        place: Where a requirements file says so; None otherwise.
    """

    text: str
    told: str
    place: Place | None = None


def requirements_in(path: Path, text: str) -> Document | None:
    """Returns the packages of a requirements file with their ranges; None when it names none that matter."""
    keys = {}
    for number, line in enumerate(text.split("\n"), start=1):
        match = _LINE.match(line)
        if match is None or match["name"].lower().replace("_", "-") not in PACKAGES:
            continue
        position = Position(line=number, column=1 + line.index(match["name"]))
        keys[match["name"].lower()] = (position, leaf((match["span"] or "").strip(), position))
    return Document(kind=Kind.REQUIREMENTS, path=path, node=section(keys, _START)) if keys else None


def project_requirements(path: Path, text: str) -> Document | None:
    """Returns the packages that a pyproject.toml depends on; of a package that stands twice, the first."""
    seen: list[str] = []
    lines = []
    for line in text.split("\n"):
        match = _QUOTED.search(line)
        first = match is not None and match["name"].lower() not in seen
        seen += [match["name"].lower()] if match is not None else []
        lines.append(" " * match.start("name") + match["name"] + match["span"] if match is not None and first else "")
    return requirements_in(path, "\n".join(lines))


def planned_versions(documents: Iterable[Document], given: Mapping[str, str]) -> dict[str, Version]:
    """Returns the version of each package that counts: as given, else as required, installed, or planned by memc.

    A range stands for the newest version in it that is known: what an installer would take.
    """
    found = {}
    asked = {
        name: (str(node.value), document.place(name))
        for document in documents
        if document.kind is Kind.REQUIREMENTS
        for name, (_, node) in document.node.keys.items()
    }
    for name in PACKAGES:
        if name in given:
            found[name] = Version(text=given[name], told="given")
        elif name in asked and (newest := _newest(name, asked[name][0])) is not None:
            found[name] = Version(text=newest, told=f"as {asked[name][1].path.name} asks", place=asked[name][1])
        elif (installed := _installed(name)) is not None:
            found[name] = Version(text=installed, told="installed")
        else:
            found[name] = Version(text=str(load_fact(f"stack.{name}").value), told="the one memc plans with")
    return found


def _newest(name: str, span: str) -> str | None:
    """Returns the newest version in a range, None when the range says nothing.

    Among what is known: versions that tables were read from, memc's own, and the bounds that the range names.
    """
    clauses = [_clause(part) for part in span.split(",") if part.strip()]
    if not clauses or None in clauses:
        return None
    wanted = ",".join(clause for clause in clauses if clause)
    bounds = re.findall(r"[\d][\w.]*", span)
    known = {*versions_read(name), str(load_fact(f"stack.{name}").value), *bounds}
    try:
        fitting = [candidate for candidate in known if in_range(candidate, wanted)]
    except ValueError:
        return None
    return max(fitting, key=release_of, default=None)


def _clause(text: str) -> str | None:
    """Returns a clause in operators that ranges are tested by; None for one that cannot be read."""
    match = re.fullmatch(r"\s*(~=|===?|!=|<=|>=|<|>)\s*([\d][\w.*+!-]*)\s*", text)
    if match is None:
        return None
    operator, bound = match[1], match[2]
    if bound.endswith(".*"):
        lower = bound.removesuffix(".*")
        return f">={lower},<{_next(lower)}" if operator in ("==", "===") else None
    if operator == "~=":
        return f">={bound},<{_next(bound.rpartition('.')[0] or bound)}"
    return f"{'==' if operator == '===' else operator}{bound}"


def _next(version_text: str) -> str:
    parts = version_text.split(".")
    digits = re.match(r"\d+", parts[-1])
    return ".".join([*parts[:-1], str(int(digits.group()) + 1 if digits else 1)])


@cache
def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # loads an email parser

    try:
        return version(name)
    except PackageNotFoundError:
        return None


_START = Position(line=1, column=1)
