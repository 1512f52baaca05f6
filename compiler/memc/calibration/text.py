"""What `memc calibrate` prints: figures by card, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator

from memc.calibration.collect import Collected, no_nearer
from memc.facts.calibration import format_figure
from memc.facts.measured import FIGURES, figures_of


def text_lines(collected: Collected) -> Iterator[str]:
    """Yields the lines for a terminal: each card's figures with median, spread and count, then what does not count."""
    for card in collected.cards:
        items = collected.of(card)
        fresh = sum(item.id in collected.new for item in items)
        yield f"{card}: {len(items)} measurements, {fresh} of them new"
        documents = [item.document() for item in items]
        for name, figure in figures_of(documents).items():
            low, high = format_figure(name, figure.minimum), format_figure(name, figure.maximum)
            yield f"  {format_figure(name, figure.median):>26}  {name}: {low} to {high} in {figure.count}"
            yield f"  {'':26}  {no_nearer(documents, name, figure) or FIGURES[name]}"
    if collected.left_out:
        yield f"left out: {len(collected.left_out)}"
        yield from (f"  {item.place}: {item.reason}" for item in collected.left_out)
