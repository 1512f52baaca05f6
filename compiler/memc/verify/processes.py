"""A launcher in a process group of its own, with a time limit, of which nothing stays behind.

Ending the group is not enough: torchrun gives each worker a session of its own. Every process inherits an environment
variable with a random value, by which Linux finds what the group has lost.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from memc.verify.operators import locks_held_by, release

TAIL_LINES = 40
GRACE_SECONDS = 3.0
POLL_SECONDS = 0.05
MARK = "MEMC_VERIFY_RUN"


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a launcher ended.

    Attributes:
        exit_code: Of the launcher; negative for a signal; None when the time limit ended it.
        seconds: Wall clock from start to end.
        tail: Its last lines of output; at the time limit, those before it was ended.
    """

    exit_code: int | None
    seconds: float
    tail: tuple[str, ...]

    @property
    def timed_out(self) -> bool:
        """Whether the time limit ended it."""
        return self.exit_code is None


def run_launcher(
    command: list[str],
    *,
    environment: Mapping[str, str],
    timeout_seconds: float,
    on_line: Callable[[str], None],
    folder: Path | None = None,
) -> Finished:
    """Runs `command`, hands each line it prints to `on_line`, and returns how it ended.

    However this function is left (end, time limit, Ctrl-C, SIGTERM, SIGHUP, an error in `on_line`), no process that
    the launcher started is alive afterwards, and none of them leaves an operator locked that it was compiling.

    Args:
        command: Program and arguments.
        environment: All of it.
        timeout_seconds: Wall clock.
        on_line: Called on a thread of its own.
        folder: Where it starts; None: the current folder.

    Raises:
        OSError: When the command cannot be started.
    """
    mark = secrets.token_hex(16)
    start = time.monotonic()
    with termination_unwinds():
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output = _Output(process.stdout, on_line)
            exit_code = _wait(process, output, start + timeout_seconds)
            before_ending = output.tail
        finally:
            _end_all(process, mark, environment)
        output.finish()
    tail = before_ending if exit_code is None else output.tail
    return Finished(exit_code=exit_code, seconds=time.monotonic() - start, tail=tail)


class _Output:
    """Reads a stream line by line on a thread of its own, so that a silent launcher cannot outlast its time limit."""

    def __init__(self, stream: IO[str] | None, on_line: Callable[[str], None]) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str] | None) -> None:
        if stream is None:
            return
        with stream:
            for line in stream:
                text = line.rstrip("\n")
                self._lines.append(text)
                if self.error is None:
                    try:
                        self._on_line(text)
                    except BaseException as error:
                        self.error = error

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def finish(self) -> None:
        """Waits for the last lines (all writers are gone); raises what `on_line` raised."""
        self._thread.join(GRACE_SECONDS)
        if self.error is not None:
            raise self.error


def _wait(process: subprocess.Popen[str], output: _Output, deadline: float) -> int | None:
    while (exit_code := process.poll()) is None:
        if time.monotonic() >= deadline:
            return None
        if output.error is not None:
            raise output.error
        time.sleep(POLL_SECONDS)
    return exit_code


def _end_all(process: subprocess.Popen[str], mark: str, environment: Mapping[str, str]) -> None:
    """Asks everything to end, waits a little, and kills what is left. A second Ctrl-C cuts the wait short."""
    locks = locks_held_by(_marked(mark), environment)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        _signal_all(process, mark, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and (process.poll() is None or _marked(mark) or _group_lives(process.pid)):
            time.sleep(POLL_SECONDS)
    # A process that was being started while the list was read is found the next time round. One that hangs in a
    # driver call dies when that call returns; waiting for it has an end too.
    deadline = time.monotonic() + GRACE_SECONDS
    locks |= locks_held_by(_marked(mark), environment)
    while _signal_all(process, mark, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    release(locks, environment)


def _signal_all(process: subprocess.Popen[str], mark: str, number: signal.Signals) -> bool:
    """Sends a signal to the group and to every marked process; returns whether there was any."""
    found = False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None or _group_lives(process.pid):
            os.killpg(process.pid, number)
            found = True
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            found = True
    return found


def _group_lives(group: int) -> bool:
    """Whether the group still has a member that is not a zombie. Without /proc, whether it has any."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    members = [status for status in _process_states() if status[1] == group]
    return not members or any(state not in "ZX" for state, _ in members)


def _process_states() -> Iterator[tuple[str, int]]:
    """Yields (state, group) of every process; nothing without /proc."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            yield fields[0], int(fields[2])


def _marked(mark: str) -> list[int]:
    """Returns the ids of all processes whose environment carries `mark`; none where there is no /proc."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in environment.read_bytes().split(b"\0"):
                pids.append(int(environment.parent.name))
    return pids


@contextlib.contextmanager
def termination_unwinds() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit meanwhile, so that ``finally`` clauses run. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
