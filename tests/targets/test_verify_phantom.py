"""`memc verify` where a card should be: all of its paths, on cards that do not exist, with the CUDA build of torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from memc.errors import ExitCode
from memc.verify.lock import read_lock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import cuda_torch

GIB, MIB = 1 << 30, 1 << 20
SITE = Path(os.environ.get("MEMC_CUDA_TORCH", cuda_torch.PLACE))
THERE = cuda_torch.has_cuda(None) or cuda_torch.has_cuda(SITE)
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.slow,
    pytest.mark.skipif(not THERE, reason="no CUDA build of torch: `make cuda-torch` puts one into build/cuda"),
]

SPEC = """\
model: HuggingFaceTB/SmolLM2-135M-Instruct
data: {train: data/train.jsonl, max_length: 2048, samples: 1000, mean_tokens: 900}
method: full
training: {epochs: 1, global_batch_size: 1}
hardware: {gpu: rtx-3060-12gb, count: 1, host_memory: 64GiB}
"""
LARGE_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":65536:8"}
"""Half a gigabyte for each library of products, where torch's default is eight megabytes: what no ledger can know."""
TAKEN_BYTES = 2 * GIB

FAULT = """\
import os, signal, sys, threading, time

number = int(os.environ.get("FAULT", "0"))
if number and any(part.endswith("stage.py") for part in sys.orig_argv):
    def strike():
        while not getattr(sys.modules.get("torch.cuda"), "is_initialized", bool)():
            time.sleep(0.05)
        with open(os.environ["STRUCK"], "w") as struck:
            struck.write(str(os.getpid()))
        os.kill(os.getpid(), number)
    threading.Thread(target=strike, daemon=True).start()
"""
"""A process that is stopped or killed from outside once it uses its card, as the kernel does when memory runs out."""

BUILD = """\
import json
from memc.rehearse.build import phantom
from memc.rehearse.toolchain import find_toolchain
print(json.dumps(phantom(find_toolchain()).environment("")))
"""


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of memc, with the CUDA build of torch before the other one."""
    path = os.pathsep.join(filter(None, (more.pop("PYTHONPATH", ""), str(SITE), os.environ.get("PYTHONPATH", ""))))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    own = {"PATH": programs, "VIRTUAL_ENV": sys.prefix, "PYTHONWARNINGS": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "MEMC_CALIBRATION": "off", **more, "PYTHONPATH": path}


@cache
def loader() -> dict[str, str]:
    """Returns what a process needs that is to find the phantom in the place of CUDA."""
    done = subprocess.run([sys.executable, "-c", BUILD], env=environment(), capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def card(folder: Path, *, capacity_bytes: int | None = None, others_bytes: int = 0) -> dict[str, str]:
    """Returns the environment in which torch finds one card: the planned one, a smaller one, or one that is shared."""
    promise = read_lock(folder)
    size = capacity_bytes or promise.capacity_bytes
    described = (1, size, promise.outside_allocator_bytes + others_bytes, 8, 6, 28, promise.gpu_name)
    return {**loader(), "MEMC_PHANTOM": "|".join(map(str, described)), "CUDA_VISIBLE_DEVICES": "0"}


def verify(folder: Path, *options: str, **more: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the document of `memc verify`."""
    command = [sys.executable, "-m", "memc", "verify", str(folder), "--json", *options]
    run = subprocess.run(
        command, cwd=folder.parent, env=environment(**more), capture_output=True, text=True, check=False
    )
    assert run.stdout, run.stderr[-3000:]
    return run.returncode, json.loads(run.stdout)


def compiled(place: Path, spec: str) -> Path:
    """Returns a compiled folder beside its spec."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "spec.yaml").write_text(spec, encoding="utf-8")
    command = [sys.executable, "-m", "memc", "compile", "spec.yaml", "--no-certify"]
    subprocess.run(command, cwd=place, env=environment(), capture_output=True, check=True)
    return place / "out"


@pytest.fixture(scope="module")
def promised_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What the plan of the spec needs by its ledger."""
    return read_lock(compiled(tmp_path_factory.mktemp("asked"), SPEC)).required_bytes


@pytest.fixture
def out(promised_bytes: int, tmp_path: Path) -> Path:
    """A plan with 100 MiB of room below its target."""
    return compiled(tmp_path, SPEC + f"memory: {{target: {promised_bytes // MIB + 100}MiB}}\n")


@pytest.fixture
def roomy(promised_bytes: int, tmp_path: Path) -> Path:
    """The same plan with a gibibyte of room: without the stage of rehearsals torch finds no data on the card."""
    return compiled(tmp_path, SPEC + f"memory: {{target: {promised_bytes // MIB + 1024}MiB}}\n")


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for temporary files."""
    return tmp_path_factory.mktemp("scratch")


def left_in(out: Path, scratch: Path) -> list[str]:
    """Returns the names of what a run has left behind; torch's own caches there do not count."""
    left = [path.name for place in (out, out.parent) for path in place.glob(".memc-*")]
    return left + [path.name for path in scratch.iterdir() if path.name.startswith(("memc-", ".memc-"))]


def test_a_whole_verdict(roomy: Path, tmp_path: Path) -> None:
    """The real launcher: settling, checkpoint, resuming in a second process, states and peaks beside the ledger."""
    before = {path.name: path.read_bytes() for path in roomy.iterdir() if path.name != "memc.lock"}
    options = ("--device", "cuda", "--synthetic", "--steps", "2", "--settle", "4")
    code, found = verify(roomy, *options, "--snapshot", str(tmp_path / "snaps"), **card(roomy))
    assert code == 0, found["diagnostics"]
    (rank,) = found["ranks"]
    phases = [phase["phase"] for phase in rank["phases"]]
    assert phases == ["load", "first_step", "steady", "save", "resume", "resumed_step"]
    assert (found["judged"], found["fits"], rank["settled"]) == (True, True, True)
    held = {account["account"]: account for account in rank["accounts"]}
    assert set(held) == {"parameters", "gradients", "optimizer_states"}
    for account in held.values():
        assert account["held_bytes"] == pytest.approx(account["ledger_bytes"], rel=0.01), account
    peak = found["attributions"]["0"]
    assert peak["moment"] == "peak"
    assert peak["accounts"]["parameters"] == pytest.approx(held["parameters"]["held_bytes"], rel=0.02)
    assert (tmp_path / "snaps/rank0.pickle").stat().st_size > 10_000
    assert found["run_seconds"] > 0
    (kept,) = json.loads((roomy / "memc.lock").read_text(encoding="utf-8"))["measurements"]
    assert kept["ranks"][0]["phases"]["resumed_step"]["allocated_bytes"] > 0
    assert before == {path.name: path.read_bytes() for path in roomy.iterdir() if path.name != "memc.lock"}


def test_out_of_memory_names_account_phase_and_next_rungs(out: Path, scratch: Path) -> None:
    before = (out / "memc.lock").read_bytes()
    needed = read_lock(out).required_bytes
    small = card(out, capacity_bytes=(needed - GIB) // MIB * MIB)
    code, found = verify(out, "--device", "cuda", "--synthetic", "--no-resume", TMPDIR=str(scratch), **small)
    assert code == ExitCode.VERIFICATION_FAILED
    (finding,) = found["diagnostics"]
    assert finding["code"] == "out-of-memory"
    assert "ran out of memory in first_step" in finding["message"]
    assert "In use then: " in finding["message"]
    assert "activations" in finding["message"]
    assert any(".py:" in line for line in finding["context"]), "frames of the snapshot"
    assert found["next"]
    assert all(cut["peak_bytes"] < cut["peak_before_bytes"] for cut in found["next"])
    assert (out / "memc.lock").read_bytes() == before
    assert left_in(out, scratch) == []


def test_it_climbs_until_a_rehearsed_plan_fits(out: Path, scratch: Path) -> None:
    first = read_lock(out)
    code, found = verify(out, "--phantom", "--escalate", "--steps", "2", TMPDIR=str(scratch), **LARGE_WORKSPACE)
    assert code == 0, found["diagnostics"]
    attempts = found["escalation"]["attempts"]
    assert [one["fits"] for one in attempts] == [False] * (len(attempts) - 1) + [True]
    assert len(attempts) > 1
    assert {one["grade"] for one in attempts} == {"rehearsed"}
    assert attempts[0]["promised_bytes"] <= first.budget_bytes < attempts[0]["measured_bytes"]
    assert [one["rung"] for one in attempts] == sorted(one["rung"] for one in attempts)
    assert any("CUBLAS_WORKSPACE_CONFIG=:65536:8" in note for note in found["notes"])
    then = read_lock(out)
    assert then.budget_bytes == first.budget_bytes
    assert then.required_bytes < first.required_bytes
    lock = json.loads((out / "memc.lock").read_text(encoding="utf-8"))
    assert lock["kept_free"]["reason"].startswith("rehearsed, ")
    assert [(kept["grade"], kept["fits"]) for kept in lock["measurements"]] == [("rehearsed", True)]
    assert left_in(out, scratch) == []


@pytest.fixture
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which a rehearsed process is struck."""
    place = tmp_path_factory.mktemp("fault")
    (place / "sitecustomize.py").write_text(FAULT, encoding="utf-8")
    return {"PYTHONPATH": str(place), "STRUCK": str(place / "struck")}


def ended(faulty: dict[str, str]) -> bool:
    """Whether the process that was struck is gone."""
    return not Path("/proc", Path(faulty["STRUCK"]).read_text(encoding="utf-8")).exists()


def test_a_rank_that_dies_says_by_which_signal(out: Path, scratch: Path, faulty: dict[str, str]) -> None:
    before = (out / "memc.lock").read_bytes()
    code, found = verify(out, "--phantom", TMPDIR=str(scratch), FAULT=str(int(signal.SIGKILL)), **faulty)
    assert code == ExitCode.VERIFICATION_FAILED
    (finding,) = found["diagnostics"]
    assert finding["code"] == "launcher-failed"
    assert "ended by signal 9" in finding["message"]
    assert ended(faulty)
    assert (out / "memc.lock").read_bytes() == before
    assert left_in(out, scratch) == []


def start_and_wait_until_struck(out: Path, *options: str, **more: str) -> subprocess.Popen[bytes]:
    """Returns a running `memc verify --phantom` whose process has stopped to answer anything but SIGKILL."""
    command = [sys.executable, "-m", "memc", "verify", str(out), "--phantom", "--json", *options]
    process = subprocess.Popen(
        command,
        env=environment(FAULT=str(int(signal.SIGSTOP)), **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and not Path(more["STRUCK"]).exists():
        time.sleep(0.1)
    return process


def test_a_hung_rank_is_ended_by_an_interrupt(out: Path, scratch: Path, faulty: dict[str, str]) -> None:
    before = (out / "memc.lock").read_bytes()
    process = start_and_wait_until_struck(out, TMPDIR=str(scratch), **faulty)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert ended(faulty)
    assert (out / "memc.lock").read_bytes() == before
    assert left_in(out, scratch) == []


def test_a_hung_rank_is_ended_at_the_time_limit(out: Path, scratch: Path, faulty: dict[str, str]) -> None:
    before = (out / "memc.lock").read_bytes()
    process = start_and_wait_until_struck(out, "--timeout", "90", TMPDIR=str(scratch), **faulty)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == ExitCode.VERIFICATION_FAILED
    (finding,) = json.loads(said)["diagnostics"]
    assert finding["code"] == "verification-timed-out"
    assert "no report from rank 0" in finding["message"]
    assert ended(faulty)
    assert (out / "memc.lock").read_bytes() == before
    assert left_in(out, scratch) == []


def shared(place: Path, used_bytes: int, folder: Path) -> dict[str, str]:
    """Returns the environment of a card on which others hold memory, as nvidia-smi and the card itself say."""
    place.mkdir()
    name, total = read_lock(folder).gpu_name, (read_lock(folder).capacity_bytes or 0) // MIB
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    answers = {
        "--query-gpu": f"0, {uuid}, {name}, {total}, {used_bytes // MIB}, 0, [N/A], [N/A], [N/A]",
        "--query-compute-apps": f"{uuid}, 4711, serve, {used_bytes // MIB}",
    }
    cases = "".join(f"  {question}=*) echo '{line}' ;;\n" for question, line in answers.items())
    program = place / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\n', encoding="utf-8")
    program.chmod(0o755)
    path = os.pathsep.join([str(place), environment()["PATH"]])
    return {**card(folder, others_bytes=used_bytes), "PATH": path}


def test_a_card_that_others_fill_is_refused_before_anything_starts(out: Path, tmp_path: Path) -> None:
    busy = shared(tmp_path / "bin", 9 * GIB, out)
    command = [sys.executable, "-m", "memc", "verify", str(out), "--synthetic"]
    run = subprocess.run(command, env=environment(**busy), capture_output=True, text=True, check=False)
    assert run.returncode == ExitCode.VERIFICATION_FAILED
    assert "error[card-busy]: GPU 0 (NVIDIA GeForce RTX 3060) has 2.6" in run.stderr
    assert "4711 serve 9.00 GiB" in run.stderr


def test_what_others_hold_is_blamed_on_them_and_nothing_is_climbed(roomy: Path, tmp_path: Path) -> None:
    beside = shared(tmp_path / "bin", TAKEN_BYTES, roomy)
    options = ("--device", "cuda", "--synthetic", "--no-resume", "--steps", "2", "--settle", "0", "--escalate")
    code, found = verify(roomy, *options, **beside)
    assert code == ExitCode.VERIFICATION_FAILED
    (finding,) = found["diagnostics"]
    assert finding["code"] == "card-shared"
    assert "2.00 GiB that others held" in finding["message"]
    assert found["ranks"][0]["others_bytes"] == TAKEN_BYTES
    assert len(found["escalation"]["attempts"]) == 1
