"""The trace of a plan: asked of a process of its own, so that this one loads no framework and can stop waiting."""

from memc.certify.child import NotTraced, TraceAnswer, TraceProcess
from memc.certify.request import Request, interval_share, request_digest, trace_request, untraceable
from memc.certify.settle import Settled, certified_answer
from memc.certify.stack import installed_versions, missing_libraries, stack_is_here, tracer_digest
from memc.certify.steps import step_of

__all__ = [
    "NotTraced",
    "Request",
    "Settled",
    "TraceAnswer",
    "TraceProcess",
    "certified_answer",
    "installed_versions",
    "interval_share",
    "missing_libraries",
    "request_digest",
    "stack_is_here",
    "step_of",
    "trace_request",
    "tracer_digest",
    "untraceable",
]
