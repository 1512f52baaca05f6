"""Names and defaults of settings by version, as facts in specs/settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from memc.facts.documents import nearest, read_spec
from memc.rules.records import release_of

_FOLDER = "settings"


@dataclass(frozen=True, kw_only=True)
class Successor:
    """What became of a name.

    Attributes:
        new: The name now, with a word on its meaning where that changed; empty when nothing took its place.
        advice: What to do, as an instruction.
    """

    new: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """The names that one reader knows, by version.

    Attributes:
        key: File of the table.
        package: Package that the reader belongs to.
        versions: Versions that were read, oldest first.
        names: Per name: ``spans`` of versions that have it where not all have, ``defaults`` by first version.
    """

    key: str
    package: str
    versions: tuple[str, ...]
    names: Mapping[str, Mapping[str, Any]]

    def near(self, version: str) -> tuple[str, ...]:
        """Returns the versions that were read and stand for `version`: itself, or those on either side.

        A release within a minor version that was read is taken for the one that was.
        """
        wanted = release_of(version)
        same = [read for read in self.versions if _minor(read) == _minor(version)]
        if same:
            return (same[-1],)
        below = [read for read in self.versions if release_of(read) < wanted]
        above = [read for read in self.versions if release_of(read) > wanted]
        return (*below[-1:], *above[:1])

    def has(self, name: str, version: str) -> bool:
        """Whether the version knows the name; either neighbour does, where the version itself was not read."""
        entry = self.names.get(name)
        if entry is None:
            return False
        return "spans" not in entry or any(_within(entry["spans"], read) for read in self.near(version))

    def known(self, version: str) -> tuple[str, ...]:
        """Returns every name that the version knows."""
        return _known(self.key, version)

    def default(self, name: str, version: str) -> Any:
        """Returns a name's default; None when it has none, is unknown, or has one that is no plain value."""
        entry = self.names.get(name)
        if entry is None or not self.has(name, version):
            return None
        found = None
        for since, value in (entry.get("defaults") or {}).items():
            if release_of(since) <= release_of(self.near(version)[0]):
                found = value
        return found

    def added_in(self, name: str) -> str:
        """Returns the first version that was read and has the name; empty when the first that was read has it."""
        entry = self.names.get(name) or {}
        return str(entry["spans"][0][0]) if "spans" in entry and entry["spans"][0][0] != self.versions[0] else ""

    def last_with(self, name: str) -> str:
        """Returns the last version that was read and has the name; empty when the newest has it."""
        entry = self.names.get(name) or {}
        return str(entry["spans"][-1][1]) if "spans" in entry and entry["spans"][-1][1] != self.versions[-1] else ""


@cache
def _known(key: str, version: str) -> tuple[str, ...]:
    held = table(key)
    return tuple(name for name in held.names if held.has(name, version))


def _minor(version: str) -> tuple[int, ...]:
    return (*release_of(version), 0, 0)[:2]


def _within(spans: Iterable[Iterable[str]], version: str) -> bool:
    return any(release_of(first) <= release_of(version) <= release_of(last) for first, last in spans)


@cache
def table(key: str) -> Table:
    """Returns the table in a file of specs/settings."""
    document = read_spec(_FOLDER, key)
    return Table(
        key=key,
        package=str(document["package"]),
        versions=tuple(map(str, document["versions"])),
        names={name: entry or {} for name, entry in document["names"].items()},
    )


@cache
def successors(package: str) -> Mapping[str, Successor]:
    """Returns what became of names that a package renamed or removed."""
    document = read_spec(_FOLDER, "renamed")["packages"].get(package) or {}
    return {
        old: Successor(new=str(entry.get("new") or ""), advice=str(entry["advice"])) for old, entry in document.items()
    }


@cache
def versions_read(package: str) -> tuple[str, ...]:
    """Returns the versions of a package that any table was read from, oldest first."""
    found = {version for key in TABLES for version in table(key).versions if table(key).package == package}
    return tuple(sorted(found, key=release_of))


def close_name(name: str, known: Iterable[str]) -> str:
    """Returns the known name that looks like `name`; empty when none does."""
    return next(iter(nearest(name, known, count=1)), "")


TABLES = (
    "accelerate-config",
    "accelerate-launch",
    "adapter-config",
    "deepspeed",
    "deepspeed-offload-optimizer",
    "deepspeed-offload-param",
    "deepspeed-zero",
    "dpo-config",
    "fsdp-config",
    "grpo-config",
    "kto-config",
    "model-config",
    "quantization-config",
    "reward-config",
    "script-arguments",
    "sft-config",
    "training-arguments",
)
"""Files of specs/settings that hold a table."""
