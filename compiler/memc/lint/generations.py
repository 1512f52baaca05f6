"""Keys of FSDP1 in a file for FSDP2, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from memc.facts.documents import read_spec
from memc.lint.context import Context
from memc.lint.records import Document, Kind, Place, Remark, Weight
from memc.lint.statements import switch
from memc.lint.values import values_of

_WEIGHTS = {"error": Weight.ERROR, "warning": Weight.WARNING}


def generation_remarks(context: Context) -> Iterator[Remark]:
    """Yields a remark for each FSDP key that belongs to another generation than the one that runs."""
    version = values_of(context).get("fsdp_version")
    if version not in (1, 2):
        return
    for document in context.statements.of(Kind.FSDP, Kind.LAUNCH):
        for written in document.node.keys:
            entry = _entries(version).get(_bare(document, written))
            if entry is None or (entry.get("only_when_on") and switch(document.value(written)) is not True):
                continue
            if entry.get("only_text") and switch(document.value(written)) is not None:
                continue
            if entry.get("only_switch") and switch(document.value(written)) is None:
                continue
            prefix = "fsdp_" if written.startswith("fsdp_") else ""
            new = entry.get("new") or ""
            hint = str(entry["advice"]).replace("{new}", prefix + new).replace("{old}", written)
            message = f"{written} is a key of FSDP{entry['of']}, and FSDP{version} runs: {entry['then']}"
            yield Remark(
                code="fsdp-key-of-other-generation",
                weight=_WEIGHTS[entry["severity"]],
                message=message,
                hint=hint,
                place=document.place(written),
                others=_version_places(context),
            )


def _bare(document: Document, written: str) -> str:
    if document.kind is Kind.LAUNCH and not written.startswith("fsdp_"):
        return ""
    return written.removeprefix("fsdp_")


def _version_places(context: Context) -> tuple[Place, ...]:
    stated = context.statements.first("fsdp_version")
    return (stated.place,) if stated is not None else ()


@cache
def _entries(version: int) -> Mapping[str, Mapping[str, Any]]:
    """Returns the keys that do not belong to a version, by name without their prefix."""
    found: Mapping[str, Mapping[str, Any]] = read_spec("settings", "fsdp-generations")["keys"][str(version)]
    return found
