"""The process that traces: started here, given requests, read until it ends or its time is up."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memc.certify.request import Request
from memc.errors import Diagnostic

_WORKER = "memc.certify.worker"
_QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True)
class Asked:
    """Requests, and how long their answers may take all together.

    Attributes:
        requests: What to trace.
        seconds: Wall-clock time, start of the process included.
    """

    requests: Sequence[Request]
    seconds: float


@dataclass(frozen=True)
class NotTraced:
    """Why a request has no trace."""

    diagnostic: Diagnostic


TraceAnswer = dict[str, Any] | NotTraced
"""A `memc/trace/1` step, or why there is none."""


def trace_all(asked: Asked) -> list[TraceAnswer]:
    """Returns an answer to every request, in their order. What goes wrong is an answer; nothing is raised."""
    with tempfile.TemporaryFile() as talk:
        try:
            lines, late = _run(asked, talk)
        except OSError as error:
            return [_not_traced("trace-failed", f"no process for the trace: {error}")] * len(asked.requests)
        talk.seek(0, os.SEEK_END)
        talk.seek(max(0, talk.tell() - 4096))
        last = talk.read().decode(errors="replace").strip().splitlines()[-1:]
    answers = [_answer(json.loads(line)) for line in lines[: len(asked.requests)]]
    if late:
        rest = _not_traced("trace-too-slow", f"the trace was not done after {asked.seconds:.0f} s", late=True)
    else:
        rest = _not_traced("trace-failed", f"the trace ended without an answer: {' '.join(last) or 'no message'}")
    return [*answers, *[rest] * (len(asked.requests) - len(answers))]


def _run(asked: Asked, talk: Any) -> tuple[list[str], bool]:
    """Returns the lines that the worker wrote, and whether it was stopped for taking too long."""
    command = [sys.executable, "-P", "-m", _WORKER]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=talk,
        env={**os.environ, **_QUIET},
        start_new_session=True,
    ) as worker:
        late = False
        try:
            out, _ = worker.communicate(pickle.dumps(tuple(asked.requests)), timeout=asked.seconds)
        except subprocess.TimeoutExpired:
            late = True
            _stop(worker)
            out, _ = worker.communicate()
        except BaseException:
            _stop(worker)
            raise
    return [line for line in out.decode(errors="replace").splitlines() if line.endswith("}")], late


def _stop(worker: subprocess.Popen[bytes]) -> None:
    """Ends the worker and what it started."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):
        worker.kill()


def _answer(document: dict[str, Any]) -> TraceAnswer:
    if "error" not in document:
        return document
    return NotTraced(Diagnostic(**document["error"]))


def _not_traced(code: str, message: str, *, late: bool = False) -> NotTraced:
    hint = "give it more time with --timeout" if late else "report it together with the spec"
    return NotTraced(Diagnostic(code=code, message=message, hint=hint))
