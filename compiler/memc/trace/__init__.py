"""The memory of one training step, measured on the real modelling code without data. Needs torch and transformers."""

from memc.trace.attribution import ModuleShare, PhasePeak, TimelinePoint
from memc.trace.peaks import Instant, Peak, Share
from memc.trace.records import H100, Card
from memc.trace.reserved import Reserved
from memc.trace.stacks import StackDepth
from memc.trace.steptrace import StepTrace, step_peaks, trace_step

__all__ = [
    "H100",
    "Card",
    "Instant",
    "ModuleShare",
    "Peak",
    "PhasePeak",
    "Reserved",
    "Share",
    "StackDepth",
    "StepTrace",
    "TimelinePoint",
    "step_peaks",
    "trace_step",
]
