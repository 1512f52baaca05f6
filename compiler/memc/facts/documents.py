"""Reading of fact files: one YAML document per thing, refused without `source` and `checked`."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from memc.errors import Location, MemcError, usage_error
from memc.resources import keep, kept_path, specs_root

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MADE_BY = "json1"
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def spec_keys(folder: str) -> tuple[str, ...]:
    """Returns the keys (file names without suffix) of the fact files in a folder of specs, sorted."""
    root = specs_root().joinpath(folder)
    names = (entry.name for entry in root.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def spec_file(folder: str, key: str) -> Traversable:
    """Returns the fact file of `key`; it may not exist."""
    return specs_root().joinpath(folder, f"{key}.yaml")


def read_spec(folder: str, key: str) -> dict[str, Any]:
    """Returns the document of one fact file; JSON of what its YAML held is kept and read in its place.

    Raises:
        MemcError: When it is no YAML mapping or lacks `source` or `checked`.
    """
    file, name = spec_file(folder, key), f"{folder}/{key}.yaml"
    content = file.read_bytes()
    path, digest = kept_path(file, _MADE_BY), hashlib.sha256(content).digest()
    document = _kept(path, digest)
    if document is None:
        document = parse_spec(content.decode(), name=name)
        text = json.dumps(document, default=repr)
        if json.loads(text) == document:  # what JSON cannot say is read anew each time
            keep(path, digest + text.encode())
    else:
        require_sourced(document, name=name)
    return document


def _kept(path: Path | None, digest: bytes) -> dict[str, Any] | None:
    """Returns the document that was made of a file with this digest; None when none is kept."""
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        content = path.read_bytes()
        if content.startswith(digest):
            document: dict[str, Any] = json.loads(content[len(digest) :])
            return document
    return None


def parse_spec(text: str, *, name: str) -> dict[str, Any]:
    """Returns the mapping that a fact file's text holds.

    Args:
        text: YAML.
        name: What to call the file in an error.

    Raises:
        MemcError: ``fact-file-malformed`` for other than a YAML mapping, ``fact-unsourced`` when a record lacks
            `source` or an ISO date under `checked`.
    """
    where = Location(file=name)
    try:
        document = yaml.load(text, Loader=_LOADER)  # a safe loader
    except yaml.YAMLError as error:
        raise usage_error("fact-file-malformed", f"{name} is not YAML: {error}", where=where) from error
    if not isinstance(document, dict):
        raise usage_error("fact-file-malformed", f"{name} must hold a mapping", where=where)
    require_sourced(document, name=name)
    return document


def require_sourced(record: Mapping[str, Any], *, name: str, field: str = "") -> None:
    """Checks that a record says where it comes from and when that was checked.

    Raises:
        MemcError: ``fact-unsourced`` when `source` is empty or `checked` is no ISO date.
    """
    missing = []
    if not str(record.get("source") or "").strip():
        missing.append("source")
    if not _DATE.fullmatch(str(record.get("checked") or "")):
        missing.append("checked")
    if missing:
        raise usage_error(
            "fact-unsourced",
            f"{name} has no {' and no '.join(missing)}",
            where=Location(file=name, field=field),
            hint="add source: (where the figures were read) and checked: (a date, YYYY-MM-DD)",
        )


@cache
def read_names(folder: str, key: str) -> tuple[str, ...]:
    """Returns `name` and `aliases` of one fact file, without parsing what follows them."""
    names: list[str] = []
    field = ""
    depth = 0
    for event in yaml.parse(spec_file(folder, key).read_text(encoding="utf-8"), Loader=_LOADER):
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            depth -= 1
            if field == "aliases":
                break
            field = ""
        elif isinstance(event, yaml.ScalarEvent):
            if field in ("name", "aliases"):
                names.append(event.value)
            field = field if depth > 1 else "" if field else event.value
    return tuple(names)


def read_json_object(text: str, *, name: str) -> dict[str, Any]:
    """Returns the object that JSON text holds.

    Raises:
        MemcError: ``model-config-malformed`` with the position of the first error.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise usage_error(
            "model-config-malformed",
            f"{name} is not JSON: {error.msg}",
            where=Location(file=name, line=error.lineno, column=error.colno),
            hint="pass the config.json that save_pretrained or the hub wrote",
        ) from error
    if not isinstance(document, dict):
        raise usage_error("model-config-malformed", f"{name} must hold a JSON object", where=Location(file=name))
    return document


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> tuple[str, ...]:
    """Returns up to `count` known names that look like `name`, best first; case does not matter."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)
    return tuple(by_folded[folded] for folded in found)


def unknown_name(kind: str, name: str, known: Iterable[str], *, hint: str) -> MemcError:
    """Returns the error for a name that is not in the catalogue, with the nearest ones in its sentence."""
    close = nearest(name, known)
    guess = f"; nearest: {', '.join(close)}" if close else ""
    return usage_error(f"{kind}-unknown", f"no {kind} is called {name!r}{guess}", hint=hint)
