"""Probing: what this machine achieves, measured in about a minute by processes of their own."""

from memc.probing.run import Probed, probe
from memc.probing.text import text_lines

__all__ = ["Probed", "probe", "text_lines"]
