"""The process that traces: started with the first request, kept for the next, ended when it is late or done with."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import IO, Any

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
_TALK_BYTES = 4096


@dataclass(frozen=True)
class NotTraced:
    """Why a request has no trace."""

    diagnostic: Diagnostic


TraceAnswer = dict[str, Any] | NotTraced
"""A `memc/trace-step/1` document, or why there is none."""


class TraceProcess:
    """Traces requests, one after the other, in a process of its own, which imports the frameworks once."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._talk: IO[bytes] | None = None

    def __enter__(self) -> TraceProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def trace(self, request: Request, seconds: float) -> TraceAnswer:
        """Returns the document of a traced step, or why there is none. What goes wrong is an answer; nothing is raised.

        Args:
            request: What to trace.
            seconds: How long it may take, the start of the process included.
        """
        try:
            worker = self._running()
            assert worker.stdin is not None
            worker.stdin.write(pickle.dumps(request))
            worker.stdin.flush()
            line = self._lines.get(timeout=seconds) if seconds > 0 else None
        except OSError as error:
            self._stop()
            return _not_traced("trace-failed", f"no process for the trace: {error}")
        except queue.Empty:
            line = None
        except BaseException:
            self._stop()
            raise
        if line is None:
            self._stop()
            return _not_traced("trace-too-slow", f"the trace was not done after {max(0.0, seconds):.3g} s", late=True)
        if not line:
            said = self._last_words()
            self._stop()
            return _not_traced("trace-failed", f"the trace ended without an answer: {said or 'no message'}")
        document = json.loads(line)
        return NotTraced(Diagnostic(**document["error"])) if "error" in document else dict(document)

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the worker, started when there is none."""
        if self._worker is None:
            self._talk = tempfile.TemporaryFile()  # noqa: SIM115  closed by _stop, as long as the worker lives
            self._lines = queue.SimpleQueue()
            self._worker = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._talk,
                env={**os.environ, **_QUIET},
                start_new_session=True,
            )
            threading.Thread(target=_forward, args=(self._worker.stdout, self._lines), daemon=True).start()
        return self._worker

    def _last_words(self) -> str:
        """Returns the last line that the worker wrote on standard error."""
        if self._talk is None:
            return ""
        self._talk.seek(0, os.SEEK_END)
        self._talk.seek(max(0, self._talk.tell() - _TALK_BYTES))
        lines = self._talk.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _stop(self) -> None:
        """Ends the worker and what it started."""
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                os.killpg(worker.pid, signal.SIGKILL)
            except (AttributeError, ProcessLookupError, PermissionError):
                worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    _close(pipe)
        if self._talk is not None:
            self._talk.close()
            self._talk = None


def _forward(source: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Puts every line of `source` into a queue, and an empty one at its end."""
    with contextlib.suppress(OSError, ValueError):  # closed while it was read
        for line in source:
            lines.put(line)
    lines.put(b"")


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # what was buffered for a worker that is gone
        pipe.close()


def _not_traced(code: str, message: str, *, late: bool = False) -> NotTraced:
    hint = "give it more time with --timeout" if late else "report it together with the spec"
    return NotTraced(Diagnostic(code=code, message=message, hint=hint))
