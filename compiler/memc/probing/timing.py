"""Timing of repeated work, on a card or on the processor."""

from __future__ import annotations

import time
from collections.abc import Callable

_FEWEST, _MOST = 3, 1000
_BATCH_SECONDS = 0.05


def seconds_each(work: Callable[[], object], wait: Callable[[], object], seconds: float) -> list[float]:
    """Returns seconds of one call of `work`, from several batches of calls that follow one another.

    Args:
        work: What is timed; it may only be issued and run later.
        wait: Waits until all that was issued has run.
        seconds: How long all of it may take; three batches are timed in any case.
    """
    end = time.monotonic() + seconds
    work()
    wait()
    begin = time.perf_counter()
    work()
    wait()
    once = max(time.perf_counter() - begin, 1e-7)
    repeats = max(1, min(_MOST, round(_BATCH_SECONDS / once)))
    found: list[float] = []
    while len(found) < _FEWEST or (time.monotonic() < end and len(found) < _MOST):
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        found.append(max(time.perf_counter() - begin, 1e-9) / repeats)
    return found


def lasting(values: list[float]) -> list[float]:
    """Returns the later half of some values: what a machine keeps up once it is warm."""
    return values[len(values) // 2 :]
