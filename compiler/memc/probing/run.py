"""Runs the probing process within its time, and makes a file of figures of what it measured."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memc
from memc.errors import Diagnostic, ExitCode, MemcError, usage_error
from memc.facts import load_gpu
from memc.facts.measured import SCHEMA, figure_of, figures_document
from memc.probing.parts import HOST, PARTS
from memc.verify.operators import locks_held_by, release

_GRACE = 1.5
"""How much longer than asked the process may take, for work that began in time."""
_LAST_SECONDS = 3.0
_START_SECONDS = 120.0
"""For importing torch, before the time counts."""
_ENDING_SECONDS = 1.0
_WENT_ON = "it went on until its time was over"
_COMPILE_SECONDS = 600.0
"""For compiling an operator, which does not count either."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """What was measured.

    Attributes:
        card: Catalogue key of the machine's card; empty without one, or when the catalogue does not know it.
        machine: What the process said of the machine: torch, threads, GPUs and their name.
        figures: Values by name.
        details: By part, what else was measured.
        absent: By part, why nothing was.
        seconds: Wall clock.
    """

    card: str
    machine: dict[str, Any]
    figures: dict[str, list[float]]
    details: dict[str, dict[str, Any]]
    absent: dict[str, str]
    seconds: float

    def document(self, checked: str) -> dict[str, Any]:
        """Returns it as a file of figures.

        Args:
            checked: ISO date of today.
        """
        host = {name for part in PARTS if part.name in HOST for name in part.figures}
        figures = {name: figure_of(values) for name, values in self.figures.items()}
        own = {name: figure for name, figure in figures.items() if name in host}
        rest = {name: figure for name, figure in figures.items() if name not in host}
        known = ("torch", "cuda")
        said = ", ".join(f"{name} {self.machine[name]}" for name in known if self.machine.get(name))
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "source": f"memc probe {memc.__version__}, {said}, {self.machine.get('threads')} threads",
            "checked": checked,
        }
        if self.card:
            document["cards"] = {self.card: {"figures": figures_document(rest)}}
        document["host"] = {"figures": figures_document(own)}
        details = self.details if self.card or not rest else {**self.details, "figures": figures_document(rest)}
        return document | {"details": details, "absent": self.absent}


def probe(
    *, seconds: float = 60.0, folder: Path, parts: Sequence[str] = (), on_line: Callable[[str], None] | None = None
) -> Probed:
    """Returns what this machine achieves.

    Args:
        seconds: How long all parts may take together, without the start of the process.
        folder: On the drive that is measured; a file in it is written, read and removed.
        parts: Names of the parts to measure; all when empty.
        on_line: Called with each part's name when it ends.

    Raises:
        MemcError: ``probe-needs-torch``; ``probe-part`` for a part that is none; ``probe-folder`` when the folder is
            not there; ``probe-stopped`` with exit 5 when the process ended without measuring anything.
    """
    known = [part.name for part in PARTS]
    for name in parts:
        if name not in known:
            raise usage_error("probe-part", f"no part is called {name!r}", hint=f"use some of {', '.join(known)}")
    if not folder.is_dir():
        raise usage_error("probe-folder", f"{folder} is no folder", hint="name a folder on the drive with --disk")
    if importlib.util.find_spec("torch") is None:
        raise usage_error(
            "probe-needs-torch",
            "memc probe measures with torch, which is not installed here",
            hint="pip install torch, or memc[train], into the environment that memc runs in",
        )
    begin = time.monotonic()
    wanted = list(parts or known)
    asked = {"parts": wanted, "seconds": seconds, "folder": str(folder.resolve())}
    machine: dict[str, Any] = {}
    answers: dict[str, dict[str, Any]] = {}
    errors: list[str] = []
    preparing = ""
    for answer in _answers(asked, seconds * _GRACE + _LAST_SECONDS, errors):
        if "machine" in answer:
            machine = answer["machine"]
            continue
        if "part" not in answer:
            preparing = answer.get("preparing", "")
            if preparing and on_line is not None:
                on_line(f"{preparing}: waits for its operator, which is compiled at its first use on a machine")
            continue
        answers[answer["part"]] = answer
        if on_line is not None:
            on_line(f"{answer['part']}: {answer.get('absent', 'measured')}")
    if not answers and not (machine and "".join(errors).endswith(_WENT_ON)):
        raise _stopped("".join(errors))
    late = {name: "the time was over" for name in wanted if name not in answers}
    if preparing in late:
        late[preparing] = f"its operator was not compiled within {_COMPILE_SECONDS:.0f} s"
    card, why_not = _card(machine)
    return Probed(
        card=card,
        machine=machine,
        figures={name: values for one in answers.values() for name, values in one.get("figures", {}).items()},
        details={name: one["details"] for name, one in answers.items() if one.get("details")},
        absent={**{name: one["absent"] for name, one in answers.items() if "absent" in one}, **late, **why_not},
        seconds=time.monotonic() - begin,
    )


def _card(machine: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Returns the key of the machine's card, and what is to be said where there is none."""
    name = str(machine.get("device_name", ""))
    if not name:
        return "", {}
    if others := machine.get("other_cards"):
        return "", {"card": f"{name} is not alone: {', '.join(others)}; show one kind with CUDA_VISIBLE_DEVICES"}
    try:
        return load_gpu(name).key, {}
    except MemcError as error:
        return "", {"card": error.diagnostics[0].message}


def _answers(asked: dict[str, Any], limit_seconds: float, errors: list[str]) -> Iterator[dict[str, Any]]:
    """Yields what the process says, line by line; it and all that it started are ended when its time is over."""
    command = [sys.executable, "-m", "memc.probing.worker", json.dumps(asked)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as talk:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=talk, start_new_session=True)
        assert process.stdout is not None
        try:
            yield from _lines(process.stdout.fileno(), limit_seconds)
        finally:
            how = _how_it_ended(process)
            _end(process)
            process.stdout.close()
            talk.seek(0)
            errors.append(f"{talk.read()[-2000:]}\n{how}")


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Returns how a process ended by itself, or that it did not."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(_ENDING_SECONDS)
        return f"it was ended by signal {-code}" if code < 0 else f"it exited {code}"
    return _WENT_ON


def _lines(handle: int, limit_seconds: float) -> Iterator[dict[str, Any]]:
    """Yields each line of JSON that comes in time, which counts from the first, and not while one compiles."""
    rest, end, begun, left = b"", time.monotonic() + _START_SECONDS, False, 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        while selector.select(max(0.0, end - time.monotonic())):
            found = os.read(handle, 1 << 16)
            if not found:
                return
            *lines, rest = (rest + found).split(b"\n")
            if lines and not begun:
                begun, end = True, time.monotonic() + limit_seconds
            for answer in map(json.loads, lines):
                if "preparing" in answer:
                    left, end = end - time.monotonic(), time.monotonic() + _COMPILE_SECONDS
                elif "prepared" in answer:
                    end = time.monotonic() + left
                yield answer


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it started, and waits for it. It leaves no operator locked."""
    locks = locks_held_by([process.pid], os.environ)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    release(locks, os.environ)


def _stopped(errors: str) -> MemcError:
    lines = tuple(line for line in errors.splitlines() if line.strip())[-6:]
    finding = Diagnostic(
        code="probe-stopped",
        message="the process that measures ended before anything was measured, or was not ready in time",
        context=lines,
        hint="run python -c 'import torch; torch.cuda.init()' in the same environment to see why",
    )
    return MemcError((finding,), ExitCode.VERIFICATION_FAILED)
