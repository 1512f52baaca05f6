"""How many steps a case takes: as many as tell its time, within a few seconds."""

from __future__ import annotations

from math import ceil

MEASURED, WARM_UP, LEAST, MOST, TIMED_SECONDS = 2, 2, 3, 10, 3.0
"""Steps whose peaks are read (the second of which warms up, too), warm-up, timed steps, and how long these may take."""


def steps_for(step_seconds: float) -> int:
    """Returns the steps of a case on a card, those that phases are timed in included."""
    timed = min(MOST, max(LEAST, ceil(TIMED_SECONDS / step_seconds)))
    return MEASURED + WARM_UP - 1 + timed + LEAST
