"""The memory of one training step, measured on the real modelling code without data. Needs torch and transformers."""

from memc.trace.peaks import Instant, Peak, Share
from memc.trace.steptrace import StepTrace, trace_step

__all__ = ["Instant", "Peak", "Share", "StepTrace", "trace_step"]
