"""Arguments of Python calls that libraries renamed or moved: trainers and `from_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from memc.facts.documents import read_spec
from memc.lint.context import Context
from memc.lint.records import Kind, Remark, Weight
from memc.rules.records import in_range

_SECTIONS = {"trainer_arguments": "trainers", "from_pretrained": "from_pretrained"}
_WEIGHTS = {"error": Weight.ERROR, "warning": Weight.WARNING, "note": Weight.NOTE}


def call_remarks(context: Context) -> Iterator[Remark]:
    """Yields a remark for each argument of a call that the versions that count do not take any more."""
    for document in context.statements.of(Kind.SCRIPT):
        for section, named in _SECTIONS.items():
            called = document.find(section)
            for name in called.keys if called is not None else ():
                entry = _moved(named).get(name)
                if entry is None:
                    continue
                versions = context.plain_versions
                gone = all(in_range(versions[package], span) for package, span in entry["versions"].items())
                trainers = entry.get("of")
                if not gone or (trainers and document.value("trainer") not in trainers):
                    continue
                told = ", ".join(f"{package} {versions[package]}" for package in entry["versions"])
                what = str(document.value("trainer")) if named == "trainers" else "from_pretrained"
                yield Remark(
                    code="call-argument-moved",
                    weight=_WEIGHTS[entry["severity"]],
                    message=f"{what} of {told} takes no {name}",
                    hint=str(entry["advice"]),
                    place=document.place(section, name),
                )


@cache
def _moved(named: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the arguments of a call that moved, by name."""
    found: Mapping[str, Mapping[str, Any]] = read_spec("settings", "moved-arguments")[named]
    return found
