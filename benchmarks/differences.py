"""Statistics of relative differences, for every comparison of the ledger with another way to know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Summary:
    """Differences of some comparisons, as fractions of what the ledger is held to.

    Attributes:
        count: How many.
        median, p90: Of their sizes.
        over: The largest by which the ledger is above; 0 when it never is.
        under: The largest by which it is below, as a negative number; 0 when it never is.
    """

    count: int
    median: float
    p90: float
    over: float
    under: float

    @property
    def worst(self) -> float:
        """The larger of both."""
        return max(self.over, -self.under)


def summary_of(differences: Iterable[float]) -> Summary | None:
    """Returns the statistics of differences; None without any."""
    found = list(differences)
    if not found:
        return None
    sizes = [abs(item) for item in found]
    return Summary(len(sizes), quantile(sizes, 0.5), quantile(sizes, 0.9), max(0.0, *found), min(0.0, *found))
