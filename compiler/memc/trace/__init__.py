"""The memory of one training step, measured on the real modelling code without data. Needs torch and transformers."""

from memc.trace.attribution import ModuleShare, PhasePeak, TimelinePoint
from memc.trace.peaks import Instant, Peak, Share
from memc.trace.stacks import StackDepth
from memc.trace.steptrace import StepTrace, trace_step

__all__ = [
    "Instant",
    "ModuleShare",
    "Peak",
    "PhasePeak",
    "Share",
    "StackDepth",
    "StepTrace",
    "TimelinePoint",
    "trace_step",
]
