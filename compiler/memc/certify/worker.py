"""What the tracing process runs: pickled requests on standard input, one line of JSON per answer on standard output."""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from typing import Any

from memc.certify.request import Request, request_digest
from memc.certify.stack import installed_versions, tracer_digest
from memc.errors import MemcError

STEP_SCHEMA = "memc/trace-step/1"


def main() -> None:
    """Answers requests until there are no more. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answers.write(json.dumps(answer(request)) + "\n")
        answers.flush()


def answer(request: Request) -> dict[str, Any]:
    """Returns the document of a traced step, or an error."""
    try:
        return step_document(request)
    except MemcError as error:
        first = error.diagnostics[0]
        return _error(first.code, first.message, first.hint)
    except ModuleNotFoundError as missing:
        name = (missing.name or "a library").partition(".")[0]
        return _error(
            "trace-library-missing",
            f"the trace runs {name}, which cannot be imported here: {missing}",
            f"pip install {name}, or install memc[train]",
        )
    except Exception as problem:  # whatever the modelling code raises on a model that was never traced
        text = " ".join(str(problem).split())[:300]
        return _error(
            "trace-failed",
            f"the modelling code stopped in the trace: {type(problem).__name__}: {text or 'no message'}",
            "run memc explain for the ledger alone, and report it together with the spec",
        )


def step_document(request: Request) -> dict[str, Any]:
    """Returns what the trace of a request found, as plain values; sizes are bytes."""
    from memc.trace import H100, Card, trace_step

    card = H100
    if request.compute_capability is not None:
        multiprocessors = request.multiprocessors or H100.multiprocessors
        card = Card(compute_capability=request.compute_capability, multiprocessors=multiprocessors)
    step = trace_step(request.config, request.model, card=card)
    phases = [
        {
            "phase": phase.value,
            "allocated_bytes": peak.allocated_bytes,
            "running": peak.running,
            "by_account": {account.value: size for account, size in peak.by_account.items()},
            "modules": [
                {
                    "module": part.module,
                    "share": part.share.value,
                    "allocated_bytes": part.allocated_bytes,
                    "blocks": part.blocks,
                    "operator": part.operator,
                }
                for part in peak.modules
            ],
        }
        for phase, peak in step.phases.items()
    ]
    return {
        "schema": STEP_SCHEMA,
        "digest": request_digest(request),
        "tracer": tracer_digest(),
        "versions": installed_versions(request.config),
        "peak_allocated_bytes": step.peak_allocated_bytes,
        "binding_phase": step.binding_phase.value,
        "phases": phases,
        "timeline": [
            {
                "event": point.event,
                "phase": point.phase.value,
                "module": point.module,
                "allocated_bytes": point.allocated_bytes,
            }
            for point in step.timeline
        ],
        "stacks": [
            {"name": stack.name, "layers": stack.layers, "traced_layers": stack.traced_layers} for stack in step.stacks
        ],
        "reserved": {
            "allocated_bytes": step.reserved.allocated_bytes,
            "expected_bytes": step.reserved.expected_bytes,
            "low_bytes": step.reserved.low_bytes,
            "high_bytes": step.reserved.high_bytes,
            "expandable_segments": step.reserved.expandable_segments,
        },
        "seconds": round(step.seconds, 3),
        "cpu_seconds": round(time.process_time(), 3),
        "peak_resident_bytes": peak_resident_bytes(),
        "assumes": list(step.assumes),
        "not_modelled": list(step.not_modelled),
    }


def peak_resident_bytes() -> int | None:
    """Returns the most memory that this process has had, its libraries included; None where that is not counted.

    Source: getrusage(2): kilobytes on Linux, bytes on macOS.
    """
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _error(code: str, message: str, hint: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "hint": hint}}


if __name__ == "__main__":
    main()
