"""verify leaves nothing behind: hung launchers, workers with sessions of their own, Ctrl-C, SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from memc.verify import Settings, verify
from memc.verify.processes import run_launcher
from verify_folder import RUN, rank_report, write_folder

# A launcher, a child in its group, a worker in a session of its own (as torchrun starts them), and one of each that
# will not listen to SIGTERM. All write their process id; the launcher then waits for ever.
HANG = (
    RUN
    + """
note() { echo "$1" >> "$here/../pids"; }
note $$
trap 'echo "ended by SIGTERM"; exit 1' TERM
sleep 600 & note $!
setsid sleep 600 & note $!
setsid bash -c 'trap "" TERM; echo $$ >> "$0/../pids"; while :; do sleep 0.1; done' "$here" &
echo half > "$probe/rank0.partial"
echo ready
wait
"""
)

VERIFY = """
import sys
from pathlib import Path
from memc.verify import Settings, verify
verify(Path(sys.argv[1]), settings=Settings(device="cuda"), on_line=lambda line: print(line, flush=True))
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def assert_all_ended(tmp_path: Path, expected: int) -> None:
    pids = [int(line) for line in (tmp_path / "pids").read_text(encoding="utf-8").split()]
    assert len(pids) == expected
    assert [pid for pid in pids if lives(pid)] == []


def test_a_hung_launcher_is_ended_with_everything_it_started(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", launcher=HANG)
    before = (folder / "memc.lock").read_bytes()
    start = time.monotonic()
    outcome = verify(folder, settings=Settings(device="cuda", timeout_seconds=1.5), on_line=lambda line: None)
    assert time.monotonic() - start < 20
    (finding,) = outcome.diagnostics
    assert finding.code == "verification-timed-out"
    assert "not finished after 1.50 s" in finding.message
    assert "no report from rank 0" in finding.message
    assert finding.context[-1] == "ready"  # what it was doing, not what it said about being ended
    assert_all_ended(tmp_path, 4)
    assert (folder / "memc.lock").read_bytes() == before
    assert not list(folder.glob(".memc-*"))


def _interruptible() -> None:
    """Undoes what a shell does to jobs in its background: a process that ignores SIGINT hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_and_wait_until_ready(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", VERIFY, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_interruptible,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            break
    time.sleep(0.3)  # the last worker writes its id after the launcher said it was ready
    return process


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_an_interrupt_ends_everything_and_leaves_the_lock(tmp_path: Path, number: signal.Signals, status: int) -> None:
    folder = write_folder(tmp_path / "out", launcher=HANG)
    before = (folder / "memc.lock").read_bytes()
    process = start_and_wait_until_ready(folder)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == status
    assert_all_ended(tmp_path, 4)
    assert (folder / "memc.lock").read_bytes() == before
    assert not list(folder.glob(".memc-*"))


def test_a_second_interrupt_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    process = start_and_wait_until_ready(write_folder(tmp_path / "out", launcher=HANG))
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert time.monotonic() - start < 3
    assert_all_ended(tmp_path, 4)


def test_a_worker_that_outlives_its_launcher_is_ended(tmp_path: Path) -> None:
    launcher = RUN + 'setsid sleep 600 & echo $! >> "$here/../pids"\ncp "$here"/reports/*.json "$probe"/\n'
    folder = write_folder(tmp_path / "out", rank_report(), launcher=launcher)
    settings = Settings(device="cuda", resume=False)
    assert verify(folder, settings=settings, on_line=lambda line: None).passed
    assert_all_ended(tmp_path, 1)


def test_an_error_of_the_listener_ends_everything_and_is_raised(tmp_path: Path) -> None:
    def fail(line: str) -> None:
        if line == "ready":
            raise BrokenPipeError("the reader has gone")

    folder = write_folder(tmp_path / "out", launcher=HANG)
    with pytest.raises(BrokenPipeError, match="the reader has gone"):
        verify(folder, settings=Settings(device="cuda"), on_line=fail)
    pids = [int(line) for line in (tmp_path / "pids").read_text(encoding="utf-8").split()]
    assert [pid for pid in pids if lives(pid)] == []


def test_the_launcher_has_a_group_of_its_own_so_that_a_terminals_interrupt_does_not_reach_it() -> None:
    command = [sys.executable, "-c", "import os; print(os.getpgrp())"]
    finished = run_launcher(command, environment=os.environ, timeout_seconds=10, on_line=lambda line: None)
    assert int(finished.tail[0]) != os.getpgrp()


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    finished = run_launcher(["true"], environment=os.environ, timeout_seconds=10, on_line=lambda line: None)
    assert finished.exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_tail_keeps_the_last_lines_whatever_bytes_they_hold() -> None:
    script = r"for i in $(seq 100); do echo line $i; done; printf 'bad \xff byte\nno newline'"
    finished = run_launcher(
        ["bash", "-c", script], environment=os.environ, timeout_seconds=10, on_line=lambda line: None
    )
    assert len(finished.tail) == 40
    assert finished.tail[-3:] == ("line 100", "bad � byte", "no newline")


COMPILES = (
    RUN
    + """
mkdir -p "$TORCH_EXTENSIONS_DIR"/{ours,theirs}
touch "$TORCH_EXTENSIONS_DIR/theirs/lock"
python3 -c '
import os, sys, time
lock = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("compiles", flush=True)
time.sleep(600)
' "$TORCH_EXTENSIONS_DIR/ours/lock"
"""
)


def test_a_process_that_is_ended_while_it_compiles_leaves_no_lock_for_others_to_wait_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "operators"))
    folder = write_folder(tmp_path / "out", launcher=COMPILES)
    outcome = verify(folder, settings=Settings(device="cuda", timeout_seconds=3), on_line=lambda line: None)
    (finding,) = outcome.diagnostics
    assert finding.context[-1] == "compiles"
    assert not (tmp_path / "operators/ours/lock").exists()
    left = tmp_path / "operators/theirs/lock"
    assert left.exists(), "what another run left is the user's to remove"
    assert f"rm {left}" in finding.hint
    assert "--timeout 6" in finding.hint


def test_a_lock_that_nobody_holds_is_named_before_a_run_that_may_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "operators"))
    held, left = (tmp_path / "operators" / name / "lock" for name in ("held", "left"))
    for lock in (held, left):
        lock.parent.mkdir(parents=True)
    left.touch()
    lines: list[str] = []
    folder = write_folder(tmp_path / "out", rank_report(), settings={"engine": "deepspeed"})
    with held.open("w"):
        settings = Settings(device="cuda", resume=False)
        assert verify(folder, settings=settings, on_line=lines.append).passed
    assert f"rm {left}" in lines[0]
    assert str(held) not in lines[0]
