"""What `memc probe` prints."""

from __future__ import annotations

from collections.abc import Iterator

from memc.facts.calibration import format_figure
from memc.facts.measured import FIGURES, figure_of
from memc.probing.run import Probed


def text_lines(found: Probed) -> Iterator[str]:
    """Yields the lines for a terminal: each figure with its spread, then what is absent and why."""
    what = found.card or found.machine.get("device_name") or "no GPU"
    yield f"measured in {found.seconds:.0f} s: {what}, {found.machine.get('threads')} threads"
    for name in FIGURES:
        if name in found.figures:
            figure = figure_of(found.figures[name])
            low, high = format_figure(name, figure.minimum), format_figure(name, figure.maximum)
            yield f"  {format_figure(name, figure.median):>26}  {name}: {low} to {high} in {figure.count}"
    yield from (f"  {'absent':>26}  {part}: {reason}" for part, reason in found.absent.items())
