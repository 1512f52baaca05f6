"""Calibration: measurements of a user's own runs, collected into figures that later plans use."""

from memc.calibration.collect import Collected, Limits, collect, document_of
from memc.calibration.text import text_lines

__all__ = ["Collected", "Limits", "collect", "document_of", "text_lines"]
