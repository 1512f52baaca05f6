"""Arguments of Python calls that libraries renamed or moved: trainers and `from_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from memc.facts.documents import read_spec
from memc.lint.context import Context
from memc.lint.records import Document, Kind, Remark, Weight
from memc.rules.records import in_range

_SECTIONS = {"trainer_arguments": "trainers", "from_pretrained": "from_pretrained"}
_WEIGHTS = {"error": Weight.ERROR, "warning": Weight.WARNING, "note": Weight.NOTE}


def call_remarks(context: Context) -> Iterator[Remark]:
    """Yields a remark for each argument of a call that the versions that count do not take any more."""
    for document in context.statements.of(Kind.SCRIPT):
        for section, named in _SECTIONS.items():
            called = document.find(section)
            for name in called.keys if called is not None else ():
                for entry in _moved(named).get(name, ()):
                    yield from _said(document, (section, name), entry, context)


def _said(document: Document, steps: tuple[str, str], entry: Mapping[str, Any], context: Context) -> Iterator[Remark]:
    section, name = steps
    versions, trainer = context.plain_versions, document.value("trainer")
    gone = all(in_range(versions[package], span) for package, span in entry["versions"].items())
    if not gone or ("of" in entry and trainer not in entry["of"]):
        return
    told = ", ".join(f"{package} {versions[package]}" for package in entry["versions"])
    what = str(trainer) if section == "trainer_arguments" else section
    weight = _WEIGHTS[entry["severity"]]
    message = f"{what} of {told} takes no {name}" if weight is Weight.ERROR else f"{name} is deprecated in {told}"
    yield Remark(
        code="call-argument-moved",
        weight=weight,
        message=message,
        hint=str(entry["advice"]),
        place=document.place(*steps),
    )


@cache
def _moved(named: str) -> Mapping[str, tuple[Mapping[str, Any], ...]]:
    """Returns the arguments of a call that moved, by name; one may have moved in several packages."""
    found = read_spec("settings", "moved-arguments")[named]
    return {name: tuple(entry) if isinstance(entry, list) else (entry,) for name, entry in found.items()}
