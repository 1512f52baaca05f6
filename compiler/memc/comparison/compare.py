"""`compare_locks`: what changed between two locks, as one frozen record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memc.comparison.fidelity import Touch, touch_of

STACK = "stack."
_DERIVED = ("zero_stage", "offload_optimizer", "offload_param", "activation_checkpointing")
_CLOCK = ("step_seconds", "total_seconds", "total_usd")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value that is not the same on both sides.

    Attributes:
        key: Dotted name.
        before, after: Its values; None also where a side does not have it.
    """

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class SettingChange(Change):
    """A setting of the plan that changed, and what that touches."""

    touch: Touch


@dataclass(frozen=True, kw_only=True)
class LineMove:
    """One ledger line that moved.

    Attributes:
        resource: ``gpu``, ``host`` or ``nvme``.
        account: The account it is booked under.
        name: Its name.
        before_bytes, after_bytes: Its size; 0 where a side does not have it.
        at_peak: Whether it is alive at the peak of either side.
    """

    resource: str
    account: str
    name: str
    before_bytes: int
    after_bytes: int
    at_peak: bool

    @property
    def change_bytes(self) -> int:
        """After minus before."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One figure on both sides, changed or not; None where a side does not know it."""

    key: str
    before: float | int | str | None
    after: float | int | str | None

    @property
    def moved(self) -> bool:
        """Whether the sides differ."""
        return self.before != self.after


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What changed between two locks.

    Attributes:
        memc: The version of memc; None when it is the same.
        spec: Fields of the resolved spec.
        facts: Facts that were read, without library versions.
        versions: Library versions.
        facts_recorded: Whether both sides say what facts they were made with.
        settings: What the plan decided, and what the script is given beyond it (``run.``).
        lines: Ledger lines, largest change first.
        peaks: Required bytes of each resource, budget of the GPU and binding phase.
        clock: Seconds and money.
    """

    memc: Change | None
    spec: tuple[Change, ...]
    facts: tuple[Change, ...]
    versions: tuple[Change, ...]
    facts_recorded: bool
    settings: tuple[SettingChange, ...]
    lines: tuple[LineMove, ...]
    peaks: tuple[Reading, ...]
    clock: tuple[Reading, ...]

    @property
    def peak_moved(self) -> bool:
        """Whether the GPU needs another number of bytes."""
        return self.peaks[0].moved

    @property
    def explained(self) -> bool:
        """Whether anything that goes into a plan changed: spec, facts, versions, memc itself."""
        return bool(self.memc or self.spec or self.facts or self.versions)


def compare_locks(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Returns what changed from one lock to another (documents that `parse_lock` accepts)."""
    facts = _changes(before["facts"], after["facts"])
    recorded = all(any(key.startswith(STACK) for key in side["facts"]) for side in (before, after))
    versions = tuple(change for change in facts if change.key.startswith(STACK))
    same = before["memc"] == after["memc"]
    return Comparison(
        memc=None if same else Change(key="memc", before=before["memc"], after=after["memc"]),
        spec=_changes(_flat(before["spec"]["resolved"]), _flat(after["spec"]["resolved"])),
        facts=tuple(change for change in facts if change not in versions) if recorded else (),
        versions=versions if recorded else (),
        facts_recorded=recorded,
        settings=_setting_changes(before, after),
        lines=_line_moves(before["ledger"], after["ledger"]),
        peaks=_peaks(before, after),
        clock=tuple(Reading(key=key, before=_number(before, key), after=_number(after, key)) for key in _CLOCK),
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """Returns the keys whose values differ, sorted."""
    return tuple(
        Change(key=key, before=before.get(key), after=after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    )


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by dotted key; lists are leaves."""
    leaves: dict[str, Any] = {}
    for key, value in section.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def _settings(lock: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of plan and script by dotted key, each once."""
    own = {key: value for key, value in lock["plan"]["settings"].items() if key not in _DERIVED}
    run = lock.get("run")
    return _flat(own) | (_flat(run, "run.") if isinstance(run, dict) else {})


def _setting_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[SettingChange, ...]:
    changes = _changes(_settings(before), _settings(after))
    return tuple(
        SettingChange(key=c.key, before=c.before, after=c.after, touch=touch_of(c.key, c.before, c.after))
        for c in changes
    )


def _line_moves(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[LineMove, ...]:
    """Returns the ledger lines that differ, largest change first."""
    old, new = _sizes(before), _sizes(after)
    alive = _at_peak(before) | _at_peak(after)
    moves = [
        LineMove(
            resource=key[0],
            account=key[1],
            name=key[2],
            before_bytes=old[key],
            after_bytes=new[key],
            at_peak=key in alive,
        )
        for key in sorted(old.keys() | new.keys())
        if old[key] != new[key]
    ]
    return tuple(sorted(moves, key=lambda move: -abs(move.change_bytes)))


def _sizes(ledger: Mapping[str, Any]) -> Counter[tuple[str, str, str]]:
    """Returns the bytes of each line; lines of one name and account in one resource are added."""
    sizes = Counter[tuple[str, str, str]]()
    for resource, bill in ledger.items():
        for entry in bill["entries"]:
            sizes[resource, entry["account"], entry["name"]] += entry["bytes"]
    return sizes


def _at_peak(ledger: Mapping[str, Any]) -> set[tuple[str, str, str]]:
    """Returns the lines that are alive at the moment of their resource's peak, or outside of every moment."""
    alive: set[tuple[str, str, str]] = set()
    for resource, bill in ledger.items():
        sums = Counter[str]()
        for entry in bill["entries"]:
            if entry.get("in_allocator", True):
                sums.update(dict.fromkeys(entry.get("moments", ()), entry["bytes"]))
        peak = max(sums, key=lambda moment: sums[moment], default="")
        alive |= {
            (resource, entry["account"], entry["name"])
            for entry in bill["entries"]
            if peak in entry.get("moments", ()) or not entry.get("in_allocator", True)
        }
    return alive


def _peaks(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Reading, ...]:
    """Returns what each resource needs, that of the GPU first, the budget of one GPU and the phase of its peak."""

    def figure(side: Mapping[str, Any], resource: str, name: str) -> Any:
        return side["ledger"].get(resource, {}).get(name)

    return (
        *(
            Reading(
                key=f"{resource}.required_bytes",
                before=figure(before, resource, "required_bytes"),
                after=figure(after, resource, "required_bytes"),
            )
            for resource in ("gpu", "host", "nvme")
        ),
        Reading(
            key="gpu.budget_bytes", before=before["budget"].get("gpu_bytes"), after=after["budget"].get("gpu_bytes")
        ),
        Reading(
            key="gpu.binding_phase",
            before=figure(before, "gpu", "binding_phase"),
            after=figure(after, "gpu", "binding_phase"),
        ),
    )


def _number(lock: Mapping[str, Any], key: str) -> float | None:
    value = lock["clock"].get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
