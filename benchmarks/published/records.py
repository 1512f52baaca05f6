"""One published record: its fields under a forgiving reading, and the reason when it cannot be used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from memc.units import GB, GIB

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOTHING = {"", "null", "none", "n/a", "na", "~"}


class Skip(Exception):  # noqa: N818 - a reason, not an error
    """Why a record is not compared, in one short sentence that records of the same kind share."""


@dataclass(frozen=True)
class Record:
    """A mapping from the corpus. Every accessor survives a missing field and a field of another type.

    Attributes:
        fields: As read.
    """

    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Returns a field as lower-case text; empty when the source is silent."""
        value = self.fields.get(name)
        return "" if value is None else str(value).strip().casefold()

    def stated(self, name: str) -> bool:
        """Returns whether the field says something; the word none is an answer too."""
        return self.fields.get(name) is not None and self.text(name) not in {"", "null", "~"}

    def is_none(self, name: str) -> bool:
        """Returns whether the field is silent or says none."""
        text = self.text(name)
        return text in _NOTHING or bool(re.match(r"none\b", text))

    def whole(self, name: str) -> int | None:
        """Returns a field as a whole number; None when it is none."""
        return whole_number(self.fields.get(name))

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Returns a nested mapping; empty when there is none."""
        value = self.fields.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def id(self) -> str:
        """What names the record in a table."""
        return str(self.fields.get("id", "unnamed"))

    @property
    def group(self) -> str:
        """Records of one group are near-duplicates."""
        return str(self.fields.get("group") or self.fields.get("source") or "ungrouped")

    @property
    def kind(self) -> str:
        """``measured``, ``oom``, ``fits`` or what else the corpus says."""
        return self.text("source_kind")

    @property
    def measured_bytes(self) -> int | None:
        """The figure in bytes; None when the record has none."""
        for name, unit in (("value_gib", GIB), ("value_gb", GB)):
            value = self.fields.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return int(value * unit)
        return None

    @property
    def capacity_bytes(self) -> int | None:
        """The card's nominal size in bytes; None when not said."""
        value = self.fields.get("gpu_mem_gb")
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return int(value * GIB)
        return None


def whole_number(value: Any) -> int | None:
    """Returns the whole number that a value is, or that its text starts with (``8 (default)``); None without one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    found = re.match(r"\s*(\d+)\b(?!\.\d)", str(value)) if value is not None else None
    return int(found.group(1)) if found else None


def decimal_number(value: Any) -> float | None:
    """Returns the number that a value is, or that its text starts with (``0.05 (default)``); None without one."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    found = re.match(r"\s*(\d+(?:\.\d+)?)", str(value)) if value is not None else None
    return float(found.group(1)) if found else None


def read_yaml(path: Path) -> Any:
    """Returns what a YAML file of this package holds."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)


def read_records(path: Path) -> list[Record]:
    """Returns the records of a corpus file: a list of mappings, or a mapping with one under ``records``.

    Raises:
        SystemExit: When the file is missing, not YAML, or holds no list.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SystemExit(f"{path} is not YAML: {error}") from error
    if isinstance(document, Mapping):
        document = document.get("records", document.get("rows"))
    if not isinstance(document, list):
        raise SystemExit(f"{path} holds no list of records")
    return [Record(item) for item in document if isinstance(item, Mapping)]
