"""`memc verify` on a card that needs more than the ledger says: the next rungs, and the climb to a plan that fits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_card import write_card
from inprocess import Ended, command_runner
from memc.errors import ExitCode

GIB = 2**30
SPEC = """\
model: Qwen/Qwen2.5-7B-Instruct
data: {train: data/train.jsonl, max_length: 4096, samples: 10000, mean_tokens: 900}
method: [lora, qlora]
training: {epochs: 1, global_batch_size: 16}
hardware: {gpu: rtx-4090, count: 1, host_memory: 64GiB}
"""


@pytest.fixture
def memc(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    return command_runner(capsys)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memc: Callable[..., Ended]) -> Path:
    """Returns a compiled folder below the current one, on a machine whose card misses nothing yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", write_card(tmp_path / "bin"))
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setenv("MISSED_BYTES", "0")
    monkeypatch.delenv("MEMC_TRACEBACK", raising=False)
    Path("spec.yaml").write_text(SPEC, encoding="utf-8")
    assert memc("compile", "spec.yaml", "--no-certify").code == 0
    return Path("out")


def lock_of(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "memc.lock").read_text(encoding="utf-8"))
    return document


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "memc.lock"}


VERIFY = ("verify", "out", "--device", "cuda", "--no-resume")


def test_a_plan_that_fits_is_left_alone(out: Path, memc: Callable[..., Ended]) -> None:
    before = files_of(out)
    done = memc(*VERIFY, "--escalate")
    assert done.code == 0, done.err
    assert done.out.startswith("fits: ")
    assert "tried:" not in done.out
    assert files_of(out) == before
    assert [kept["fits"] for kept in lock_of(out)["measurements"]] == [True]
    assert "kept_free" not in lock_of(out)


def test_without_escalation_the_next_rungs_are_named_with_their_figures(
    out: Path, memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISSED_BYTES", str(5 * GIB))
    before = files_of(out)
    done = memc(*VERIFY)
    assert done.code == ExitCode.VERIFICATION_FAILED
    assert "error[measured-peak-over-budget]" in done.out
    rungs = [line for line in done.out.splitlines() if line.startswith("next: rung ")]
    assert rungs
    assert all("peak 18.16 GiB -> " in line and "per step" in line for line in rungs)
    assert files_of(out) == before


def test_it_climbs_until_a_measured_plan_fits_and_later_compiles_agree(
    out: Path, memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MISSED_BYTES", str(6 * GIB))
    first = lock_of(out)
    done = memc(*VERIFY, "--escalate")
    assert done.code == 0, done.out + done.err
    lock = lock_of(out)
    assert lock["ledger"]["gpu"]["required_bytes"] < first["ledger"]["gpu"]["required_bytes"]
    assert lock["budget"] == first["budget"]
    assert lock["kept_free"]["bytes"] >= 5 * GIB
    (kept,) = lock["measurements"]
    assert (kept["fits"], kept["grade"]) == (True, "measured")
    assert kept["required_bytes"] == lock["ledger"]["gpu"]["required_bytes"] + 6 * GIB
    assert done.out.count("tried: ") == len((tmp_path / "starts").read_text().splitlines())
    assert "does not fit\n" in done.out
    assert "written: out holds the plan that fits" in done.out
    assert "measured, " in (out / "PLAN.md").read_text(encoding="utf-8")
    assert not list(tmp_path.glob(".memc-*"))
    assert memc("check", "out").out == "1 folder checked, all current\n"
    assert "current: out" in memc("compile", "spec.yaml", "--no-certify").err
    again = memc("explain", "out", "--json")
    assert json.loads(again.out)["plan"]["settings"] == lock["plan"]["settings"]


def test_another_spec_forgets_what_was_kept_free(
    out: Path, memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISSED_BYTES", str(6 * GIB))
    assert memc(*VERIFY, "--escalate").code == 0
    Path("spec.yaml").write_text(SPEC.replace("4096", "2048"), encoding="utf-8")
    assert memc("compile", "spec.yaml", "--no-certify").code == 0
    assert "kept_free" not in lock_of(out)


def test_nothing_is_done_that_the_spec_does_not_allow(
    out: Path, memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = SPEC.replace("[lora, qlora]", "lora").replace("64GiB", "17GiB")
    Path("spec.yaml").write_text(narrow, encoding="utf-8")
    assert memc("compile", "spec.yaml", "--no-certify").code == 0
    monkeypatch.setenv("MISSED_BYTES", str(12 * GIB))
    before = files_of(out)
    done = memc(*VERIFY, "--escalate")
    assert done.code == ExitCode.VERIFICATION_FAILED
    assert "error[out-of-memory]" in done.out
    assert "stopped: the spec allows nothing that would fit" in done.out
    assert files_of(out) == before
    assert "kept_free" not in lock_of(out)


def test_an_edit_by_hand_is_never_overwritten(
    out: Path, memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MISSED_BYTES", str(6 * GIB))
    monkeypatch.setenv("EDIT", str(out.resolve()))
    done = memc(*VERIFY, "--escalate")
    assert done.code == ExitCode.STALE
    assert "train.py was edited by hand" in done.err
    assert (out / "train.py").read_text(encoding="utf-8").endswith("# a change by hand\n")
    assert "kept_free" not in lock_of(out)
    assert not list(tmp_path.glob(".memc-*"))
    starts = len((tmp_path / "starts").read_text().splitlines())
    assert memc(*VERIFY, "--escalate").code == ExitCode.STALE
    assert len((tmp_path / "starts").read_text().splitlines()) == starts, "nothing was started"


def test_a_plan_that_fails_for_another_reason_ends_the_climb(
    out: Path, memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISSED_BYTES", str(6 * GIB))
    monkeypatch.setenv("CRASH", str(out.resolve()))
    before = files_of(out)
    done = memc(*VERIFY, "--escalate")
    assert done.code == ExitCode.VERIFICATION_FAILED
    assert "a library broke" in done.out
    first, second = (line for line in done.out.splitlines() if line.startswith("tried: "))
    assert first.endswith(", does not fit")
    assert second.endswith("not measured, failed")
    assert files_of(out) == before


def test_an_end_in_the_middle_of_a_climb_leaves_nothing(
    out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MISSED_BYTES", str(6 * GIB))
    monkeypatch.setenv("HANG", str(out.resolve()))
    before = files_of(out)
    process = subprocess.Popen(
        [sys.executable, "-m", "memc", *VERIFY, "--escalate"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "hangs\n" in iter(process.stderr.readline, ""), "the second plan was started"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert files_of(out) == before
    assert not list(tmp_path.glob(".memc-*"))
    assert not list(out.glob(".memc-*"))


def test_the_document_holds_every_attempt(
    out: Path, memc: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISSED_BYTES", str(6 * GIB))
    document = json.loads(memc(*VERIFY, "--escalate", "--json").out)
    attempts = document["escalation"]["attempts"]
    assert [one["fits"] for one in attempts] == [False] * (len(attempts) - 1) + [True]
    assert document["escalation"]["written"] is True
    assert (document["passed"], document["exit_code"], document["next"]) == (True, 0, [])
