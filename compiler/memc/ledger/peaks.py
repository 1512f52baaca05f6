"""Tapes read: which sums of sizes can be the largest, and what they are for given shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from memc.ledger.machine import Storage
from memc.units import ceil_div, round_up

_MULTIPROCESSORS = 132
_THREADS_PER_MULTIPROCESSOR = 2048
_REDUCE_THREADS = 128
_REDUCE_VECTOR = 4
"""A block of Reduce.cuh's threads and the elements each reads at once; multiprocessors of H100 and H200, and threads
that one holds, from specs/gpus and NVIDIA's CUDA programming guide (compute capability 9.0). A card with fewer makes no
larger partial sums."""


class Shapes:
    """Values of shape variables, and of the units that are products of them.

    Attributes:
        variables: ``B`` samples, ``T`` tokens of one, ``r`` the adapters' rank, and a stack's own.
    """

    __slots__ = ("_known", "variables")

    def __init__(self, variables: Mapping[str, int]) -> None:
        self.variables = variables
        self._known: dict[Any, int] = {"1": 1}

    def of(self, unit: Any) -> int:
        """Returns the value of a unit.

        A product of variables and numbers, of which ``T~128`` is rounded up to a multiple of 128, ``T-1`` is one less,
        and ``T/64-3`` is how many pieces of 64 there are, less 3; or a tuple: ``tile`` is the rows up to a limit,
        ``tiles`` those of two tiles, ``rows`` the buffer of a reduction over rows.
        """
        known = self._known.get(unit)
        if known is None:
            known = self._known[unit] = self._value(unit)
        return known

    def _value(self, unit: Any) -> int:
        if isinstance(unit, tuple):
            if unit[0] in ("single", "several"):
                return self.of(unit[1]) if (self.variables["B"] == 1) is (unit[0] == "single") else 0
            if unit[0] == "tile":
                return min(self.of(unit[1]), int(unit[2]))
            if unit[0] == "tiles":
                return min(self.of(unit[1]), 2 * int(unit[2]))
            return row_sum_bytes(self.of(unit[1]) * unit[2], unit[3])
        value = 1
        for factor in unit.split("*"):
            name, _, size = factor.partition("/")
            if size:
                pieces, _, less = size.partition("-")
                value *= ceil_div(self.variables[name], int(pieces)) - int(less or 0)
                continue
            name, _, multiple = factor.partition("~")
            if name.endswith("-1"):
                value *= self.variables[name[:-2]] - 1
                continue
            size = int(name) if name.isdigit() else self.variables[name]
            value *= round_up(size, int(multiple)) if multiple else size
        return value


@cache
def row_sum_bytes(rows: int, columns: int) -> int:
    """Returns the partial sums of a reduction over rows (gradients of norm weights and biases), and its counters.

    Source: aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig, global reduction.
    """
    if columns % _REDUCE_VECTOR or columns < _REDUCE_THREADS or rows < _REDUCE_THREADS:
        return 0
    grid = ceil_div(columns, _REDUCE_THREADS)
    target = _MULTIPROCESSORS * (_THREADS_PER_MULTIPROCESSOR // _REDUCE_THREADS)
    values_per_thread = ceil_div(rows, _REDUCE_VECTOR)
    blocks = max(min(ceil_div(target, grid), ceil_div(values_per_thread, 16)), ceil_div(values_per_thread, 256))
    if (blocks > 1 and values_per_thread >= 64) or values_per_thread >= 256:
        return 4 * columns * _REDUCE_THREADS * blocks + 4 * grid
    return 0


Key: TypeAlias = "tuple[str, Any]"
"""Account and unit."""


@dataclass(frozen=True, slots=True)
class Sum:
    """What is alive at one place of a tape: bytes per unit, by account; `position` is how much of the tape was read."""

    parts: tuple[tuple[Key, int], ...]
    position: int

    def bytes(self, shapes: Shapes) -> int:
        """Returns its size for given shapes."""
        of = shapes.of
        return sum(size * of(key[1]) for key, size in self.parts)

    def by_account(self, shapes: Shapes) -> dict[str, int]:
        """Returns its size by account."""
        sums: dict[str, int] = {}
        for (account, unit), size in self.parts:
            sums[account] = sums.get(account, 0) + size * shapes.of(unit)
        return sums


@dataclass(frozen=True, slots=True)
class Peaks:
    """The sums of a tape that can be its largest, whatever the shapes are.

    Attributes:
        sums: None is below another in every unit.
        tape: The tape, to say what is alive.
        storages: Its storages.
        texts: What `describe` has said, by account and position.
    """

    sums: tuple[Sum, ...]
    tape: tuple[int, ...]
    storages: tuple[Storage, ...]
    texts: dict[tuple[str, int], str] = field(default_factory=dict)

    def largest(self, shapes: Shapes) -> Sum:
        """Returns the largest sum for given shapes."""
        return max(self.sums, key=lambda one: one.bytes(shapes), default=Sum((), 0))

    def alive(self, at: Sum) -> tuple[Storage, ...]:
        """Returns the storages that a sum is made of."""
        alive: dict[int, None] = {}
        for event in self.tape[: at.position]:
            if event >= 0:
                alive[event] = None
            else:
                alive.pop(~event)
        return tuple(self.storages[index] for index in alive)

    def describe(self, at: Sum, account: str) -> str:
        """Returns what a sum consists of in one account: names and bytes for each unit, larger ones first."""
        key = (account, at.position)
        if key not in self.texts:
            sizes: dict[tuple[Any, str], int] = {}
            for storage in self.alive(at):
                if storage.account == account:
                    named = (storage.unit, storage.name)
                    sizes[named] = sizes.get(named, 0) + storage.size
            self.texts[key] = _listed(sizes)
        return self.texts[key]


def _listed(sizes: dict[tuple[Any, str], int]) -> str:
    """Returns sizes as text, by unit: ``B*T x (2688 layer input + 1344 q_proj output)``."""
    units: list[Any] = []  # in the order of appearance, which a page's dict does not keep for the text "1"
    for unit, _ in sizes:
        if unit not in units:
            units.append(unit)
    parts = []
    for unit in units:
        items = [(size, name) for (own, name), size in sizes.items() if own == unit]
        items.sort(key=lambda item: (-item[0], item[1]))
        inner = " + ".join(f"{size} {name}" for size, name in items)
        parts.append(f"{_unit_text(unit)} x ({inner})" if unit != "1" else inner)
    return "; ".join(parts)


def _unit_text(unit: Any) -> str:
    if isinstance(unit, tuple):
        return f"{unit[0]}({', '.join(str(part) for part in unit[1:])})"
    return str(unit)


def peaks_of(tape: Iterable[int], storages: list[Storage], start: int = 0) -> Peaks:
    """Returns the peaks of a tape after its first `start` events."""
    events = tuple(tape)
    current: dict[Key, int] = {}
    front: list[tuple[dict[Key, int], int]] = []
    rising = True
    for position, event in enumerate(events):
        if event < 0:
            if rising and position >= start:
                _enter(front, current, position)
            rising = False
        else:
            rising = True
        storage = storages[event if event >= 0 else ~event]
        key = (storage.account, storage.unit)
        current[key] = current.get(key, 0) + (storage.size if event >= 0 else -storage.size)
    if rising:
        _enter(front, current, len(events))
    sums = tuple(Sum(tuple((key, size) for key, size in found.items() if size), position) for found, position in front)
    return Peaks(sums, events, tuple(storages))


def _enter(front: list[tuple[dict[Key, int], int]], current: dict[Key, int], position: int) -> None:
    """Adds a sum to those that none is above, and takes out what it is above of."""
    for other, _ in front:
        if all(size <= other.get(key, 0) for key, size in current.items()):
            return
    front[:] = [one for one in front if any(size > current.get(key, 0) for key, size in one[0].items())]
    front.append((dict(current), position))
