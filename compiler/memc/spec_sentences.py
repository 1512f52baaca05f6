"""The sentence of each field of the spec, read from the docstring below it when somebody asks for one.

pydantic can read them itself, but does so whenever the models are imported, which every compile would wait for.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache

from memc import spec_fields
from memc.spec_fields import Section, Spec


@cache
def add_sentences() -> None:
    """Gives every field of every section its `description`, and the schema that pydantic makes of them too."""
    found = dict(_sentences(ast.parse(inspect.getsource(spec_fields))))
    sections = [*Section.__subclasses__()]
    for section in sections:
        for name, field in section.model_fields.items():
            field.description = found[section.__name__, name]
    for section in sorted(sections, key=lambda item: item is Spec):  # Spec last: its schema holds those of the others
        section.model_rebuild(force=True)


def _sentences(tree: ast.Module) -> Iterator[tuple[tuple[str, str], str]]:
    """Yields class and field with the text that stands below the field."""
    for owner in tree.body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for field, text in zip(owner.body, owner.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                yield (owner.name, field.target.id), inspect.cleandoc(text.value.value)
