"""Techniques as values, and the ladder that orders them."""

from memc.ladder.technique import Dimension, Fidelity, Situation, Technique
from memc.ladder.techniques import LADDER, technique_names, with_micro_batch

__all__ = ["LADDER", "Dimension", "Fidelity", "Situation", "Technique", "technique_names", "with_micro_batch"]
