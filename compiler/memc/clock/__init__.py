"""Seconds: operations, bytes moved, and the rates a machine reaches."""

from memc.clock.constants import ClockFacts, clock_facts
from memc.clock.estimate import Clock, RunLength
from memc.clock.steptime import StepTime

__all__ = ["Clock", "ClockFacts", "RunLength", "StepTime", "clock_facts"]
