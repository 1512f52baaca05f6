"""What follows from a card that has too little memory for a plan: the next rungs, and the climb to one that fits."""

from memc.escalation.climb import Attempt, Climb, climb
from memc.escalation.rungs import next_rungs, rung_lines

__all__ = ["Attempt", "Climb", "climb", "next_rungs", "rung_lines"]
