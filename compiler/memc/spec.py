"""The user's document: reading a spec, with every error found at once, each at its place in the text."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memc.errors import Diagnostic, Location, MemcError
from memc.spec_checks import Finding, contradictions
from memc.spec_errors import diagnose, dotted, error_path, located
from memc.spec_fields import Data, Hardware, Ladder, Lora, Memory, Pin, Section, Spec, Time, Training
from memc.spec_source import Document, parse_document, read_text
from memc.spec_values import LrScheduler, ModuleSet, Objective, RunLimit, Size

__all__ = [
    "Data",
    "Hardware",
    "Ladder",
    "LoadedSpec",
    "Lora",
    "LrScheduler",
    "Memory",
    "ModuleSet",
    "Objective",
    "Pin",
    "RunLimit",
    "Section",
    "Size",
    "Spec",
    "Time",
    "Training",
    "load_spec",
    "parse_spec",
]

MAX_DIAGNOSTICS = 50
_STAND_INS: dict[str, Any] = {"model": "unknown", "data.max_length": 1, "hardware.gpu": "unknown"}


@dataclass(frozen=True, kw_only=True)
class LoadedSpec:
    """A valid spec and the text it came from.

    Attributes:
        spec: What the user asks for.
        path: Where it was read, as it was named.
        text: The whole text.
    """

    spec: Spec
    path: Path
    text: str
    document: Document

    @property
    def name(self) -> str:
        """File name without folder."""
        return self.path.name

    def locate(self, field: str) -> Location:
        """Returns the place of a field, for example ``hardware.gpu``.

        A field that the text does not have is located at the section that would hold it.
        """
        position, _ = self.document.find(_path(field))
        return Location(file=self.document.file, line=position.line, column=position.column, field=field)

    def diagnostic(self, field: str, code: str, message: str, hint: str = "") -> Diagnostic:
        """Returns a diagnostic that points at a field, with the line of the text it stands in."""
        return located(self.document, _path(field), code, message, hint)


def load_spec(path: Path) -> LoadedSpec:
    """Returns the spec in the file at `path`.

    Raises:
        MemcError: With every problem that was found, exit code 2.
    """
    return parse_spec(read_text(path), str(path))


def parse_spec(text: str, file: str) -> LoadedSpec:
    """Returns the spec that `text` holds; `file` is the name that diagnostics show.

    Raises:
        MemcError: With every problem that was found, exit code 2.
    """
    document = parse_document(text, file)
    problems = list(document.problems)
    spec, wrong = _validated(document, problems)
    if spec is not None:
        problems += [_placed(document, found) for found in contradictions(spec) if not _touches(found, wrong)]
    if problems or spec is None:
        raise MemcError(_in_text_order(problems, file))
    return LoadedSpec(spec=spec, path=Path(file), text=text, document=document)


def _validated(document: Document, problems: list[Diagnostic]) -> tuple[Spec | None, set[str]]:
    """Returns the spec and the fields that were wrong; their values are left out of it and noted as problems."""
    try:
        return Spec.model_validate(document.root.value), set()
    except ValidationError as error:
        errors: list[Any] = error.errors(include_url=False)
    problems += diagnose(document, Spec, errors)
    paths = [error_path(found) for found in errors]
    unknown = {dotted((*path[:-1], "unknown")) for path, found in zip(paths, errors, strict=True) if _is_unknown(found)}
    return _without(document.root.value, paths), {dotted(path) for path in paths} | unknown


def _without(value: object, wrong: list[tuple[str | int, ...]]) -> Spec | None:
    """Returns the spec without its wrong fields, so that the others can still be compared; None when that fails."""
    rest: dict[str, Any] = copy.deepcopy(value) if isinstance(value, dict) else {}
    for path in wrong:
        owner = rest
        for depth, step in enumerate(path):
            inner = owner.get(str(step))
            if depth == len(path) - 1 or not isinstance(inner, dict):
                owner.pop(str(step), None)
                break
            owner = inner
    for field, stand_in in _STAND_INS.items():
        section, _, name = field.rpartition(".")
        (rest.setdefault(section, {}) if section else rest).setdefault(name, stand_in)
    try:
        return Spec.model_validate(rest)
    except ValidationError:
        return None


def _is_unknown(error: dict[str, Any]) -> bool:
    return bool(error["type"] == "extra_forbidden")


def _touches(found: Finding, wrong: set[str]) -> bool:
    """Returns whether the finding rests on a field that is wrong by itself."""
    return any(
        name == field or name.startswith(f"{field}.") or field.startswith(f"{name}.")
        for name in (found.field, *found.also)
        for field in wrong
        if name != "data" or field == "data"
    )


def _placed(document: Document, found: Finding) -> Diagnostic:
    return located(document, _path(found.field), found.code, found.message, found.hint)


def _path(field: str) -> tuple[str | int, ...]:
    return tuple(int(step) if step.isdecimal() else step for step in field.split("."))


def _in_text_order(problems: list[Diagnostic], file: str) -> tuple[Diagnostic, ...]:
    """Returns the problems from top to bottom; beyond the first fifty only their number."""
    ordered = sorted(problems, key=lambda p: (p.where.line, p.where.column) if p.where else (0, 0))
    rest = len(ordered) - MAX_DIAGNOSTICS
    if rest <= 0:
        return tuple(ordered)
    more = Diagnostic(
        code="spec-more-problems",
        message=f"{rest:,} more problems are not shown",
        where=Location(file=file),
        hint="correct those above first",
    )
    return (*ordered[:MAX_DIAGNOSTICS], more)
