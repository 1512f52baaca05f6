"""One contradiction within a spec, as the checks that look for it return it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One contradiction.

    Attributes:
        code: Kebab-case, as in a diagnostic.
        field: Dotted field it points at.
        message: One sentence with the values in it.
        hint: What to change.
        also: Further fields it depends on; it is not reported when one of them is wrong by itself. A section name
            followed by ``.unknown`` stands for an unknown key in that section.
    """

    code: str
    field: str
    message: str
    hint: str
    also: tuple[str, ...] = ()


def yaml_text(value: object) -> str:
    """Returns a value of the spec as it is written in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
