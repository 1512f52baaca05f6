"""A bill in the making: amounts by name and moment, joined into entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memc.ledger.entries import ALLOCATOR, Account, Entry, Moment
from memc.ledger.parts import MOMENTS, cached_entry, gpu_entry


@dataclass(frozen=True, slots=True)
class _Amount:
    account: Account
    bytes: int
    formula: Callable[[], str]
    source: str


class Bill:
    """Collects amounts that depend on the moment, and says each once; names are those of `Entry`.

    Attributes:
        shapes: The shape variables, for the formulas.
    """

    def __init__(self, shapes: str) -> None:
        self.shapes = shapes
        self._amounts: dict[str, dict[int, tuple[_Amount, list[Moment]]]] = {}

    def add(
        self,
        name: str,
        account: Account,
        size_bytes: int,
        moment: Moment,
        formula: Callable[[], str],
        source: str,
    ) -> None:
        """Adds an amount at a moment; the same one at another moment becomes part of the same entry."""
        if not size_bytes:
            return
        amounts = self._amounts.setdefault(name, {})
        if size_bytes in amounts:
            amounts[size_bytes][1].append(moment)
        else:
            amounts[size_bytes] = (_Amount(account, size_bytes, formula, source), [moment])

    def bytes_of(self, name: str, moment: Moment) -> int:
        """Returns what is booked under a name at a moment."""
        amounts = self._amounts.get(name, {})
        return sum(size for size, (_, moments) in amounts.items() if moment in moments)

    def sums(self) -> tuple[int, ...]:
        """Returns the bytes of all amounts at each of `MOMENTS`."""
        sums = dict.fromkeys(MOMENTS, 0)
        for amounts in self._amounts.values():
            for size, (_, moments) in amounts.items():
                for moment in moments:
                    sums[moment] += size
        return tuple(sums.values())

    def entries(self) -> list[Entry]:
        """Returns the entries; where one name stands for several amounts, the moment is added to the rarer ones."""
        found = []
        for name, amounts in self._amounts.items():
            ordered = sorted(amounts.values(), key=lambda item: -len(item[1]))
            for index, (amount, moments) in enumerate(ordered):
                own = name if not index else f"{name}-at-{moments[0].value.replace('_', '-')}"
                formula = f"{amount.formula()}; {self.shapes}"
                make = cached_entry if name.startswith(ALLOCATOR) else gpu_entry
                found.append(make(own, amount.account, amount.bytes, frozenset(moments), formula, amount.source))
        return found
