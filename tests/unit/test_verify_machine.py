"""verify and the machine: who else is on a card, slices, error correction, several nodes, snapshots, resuming, time."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from memc.diagnose import attribution
from memc.errors import ExitCode, MemcError
from memc.verify import Settings, Verification, text_lines, verify
from memc.verify.cards import cards_here, is_wsl
from memc.verify.conditions import Conditions, notes
from memc.verify.lock import read_lock
from memc.verify.measurements import joined_measurement
from memc.verify.nodes import ranks_here
from verify_folder import GIB, RUN, cpu_report, entry, rank_report, read_lock_document, write_folder, write_lock

MIB = 2**20
UUID = "5d1f2c3a-0000-1111-2222-333344445555"


def run(folder: Path, device: str = "cuda", **options: Any) -> Verification:
    settings = Settings(**({"device": device, "resume": False} | options))
    return verify(folder, settings=settings, on_line=lambda line: None)


def smi(
    place: Path, monkeypatch: pytest.MonkeyPatch, *cards: str, apps: tuple[str, ...] = (), prefix: str = ""
) -> None:
    """Puts an nvidia-smi on the PATH that answers with these lines."""
    place.mkdir(exist_ok=True)
    program = place / "nvidia-smi"
    answers = {"--query-gpu": "\n".join(cards), "--query-compute-apps": "\n".join(apps)}
    cases = "".join(f"  {name}=*) cat <<'END'\n{text}\nEND\n  ;;\n" for name, text in answers.items())
    program.write_text(f'#!/bin/sh\n{prefix}case "$1" in\n{cases}esac\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(place), os.environ["PATH"]]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def card(index: int = 0, *, used_mib: int = 1, uuid: str = UUID, busy: str = "0", mig: str = "[N/A]",
         ecc: str = "[N/A]", errors: str = "[N/A]") -> str:  # fmt: skip
    return f"{index}, GPU-{uuid}, NVIDIA GeForce RTX 4090, 23552, {used_mib}, {busy}, {mig}, {ecc}, {errors}"


# ---- what nvidia-smi says ----


def test_cards_are_read_with_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apps = (f"GPU-{UUID}, 4711, /usr/bin/python3, 2048", f"GPU-{UUID}, 12, Xorg, [N/A]")
    smi(tmp_path / "bin", monkeypatch, card(used_mib=2100, ecc="Enabled", errors="3"), card(1, uuid="b"), apps=apps)
    first, second = cards_here()
    assert (first.index, first.total_bytes, first.used_bytes) == (0, 23552 * MIB, 2100 * MIB)
    assert (first.mig, first.ecc, first.uncorrected_errors, first.utilization) == (False, True, 3, 0.0)
    assert [(p.pid, p.name, p.bytes) for p in first.processes] == [(4711, "python3", 2048 * MIB), (12, "Xorg", None)]
    assert (second.ecc, second.processes) == (None, ())


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("GPU-b", [1]), ("MIG-9f", []), ("", []), ("0,-1,1", [0])],
)
def test_only_visible_cards_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, indices: list[int]
) -> None:
    smi(tmp_path / "bin", monkeypatch, card(), card(1, uuid="b"))
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert [found.index for found in cards_here(environment)] == indices


@pytest.mark.parametrize(
    "prefix", ["exit 9\n", "echo 'NVIDIA-SMI has failed'; exit 0\n", "printf '\\377\\0'; exit 0\n"]
)
def test_an_nvidia_smi_that_fails_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    smi(tmp_path / "bin", monkeypatch, card(), prefix=prefix)
    assert cards_here() == ()


def test_linux_under_windows_is_told_by_its_kernel(tmp_path: Path) -> None:
    release = tmp_path / "osrelease"
    assert not is_wsl(release)
    release.write_text("6.8.0-45-generic\n", encoding="utf-8")
    assert not is_wsl(release)
    release.write_text("5.15.153.1-microsoft-standard-WSL2\n", encoding="utf-8")
    assert is_wsl(release)
    under_windows = Conditions(wsl=True)
    assert under_windows.document()["wsl"] is True
    assert any("WSL" in note for note in notes(read_lock(write_folder(tmp_path / "out")), under_windows, ()))


# ---- others on the card ----

FAKE_DRIVER = "int cuInit(unsigned int flags) { return 0; }\nint cuDeviceGetCount(int *n) { *n = 1; return 0; }\n"
VERIFY_AUTO = """
import sys
from pathlib import Path
from memc.errors import MemcError
from memc.verify import Settings, verify
try:
    verify(Path(sys.argv[1]), settings=Settings(resume=False), on_line=print)
except MemcError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_card_that_others_fill_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "out", rank_report())
    before = (folder / "memc.lock").read_bytes()
    smi(tmp_path / "bin", monkeypatch, card(used_mib=9000), apps=(f"GPU-{UUID}, 4711, /opt/serve, 8900",))
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    build = ["g++", "-shared", "-fPIC", "-x", "c", "-", "-o", str(libraries / "libcuda.so.1")]
    subprocess.run(build, input=FAKE_DRIVER, text=True, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
    command = [sys.executable, "-c", VERIFY_AUTO, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.VERIFICATION_FAILED, done.stderr
    assert "error[card-busy]: GPU 0 (NVIDIA GeForce RTX 4090) has 14.21 GiB free" in done.stdout
    assert "the plan needs 17.00 GiB: 8.79 GiB of it are taken already" in done.stdout
    assert "4711 serve 8.69 GiB" in done.stdout
    assert "started from" not in done.stdout
    assert (folder / "memc.lock").read_bytes() == before


def test_what_others_hold_is_not_blamed_on_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path / "bin", monkeypatch, card(used_mib=2048), apps=(f"GPU-{UUID}, 4711, serve, 2000",))
    report = rank_report(peak_gib=18.0, device_uuid=UUID, device_used_bytes=int(20.5 * GIB))
    outcome = run(write_folder(tmp_path / "out", report))
    (finding,) = outcome.diagnostics
    assert finding.code == "card-shared"
    assert "needs 18.50 GiB itself" in finding.message
    assert "with the 2.00 GiB that others held" in finding.message
    assert finding.context == ("4711 serve 1.95 GiB",)
    assert not outcome.over_memory, "climbing would not help"
    assert "note: GPU 0 was not free: 2.00 GiB were taken before the run (4711 serve 1.95 GiB)" in text_lines(outcome)


def test_slices_errors_and_a_computing_card_are_noted_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path / "bin", monkeypatch, card(mig="Enabled", ecc="Enabled", errors="2", busy="97"))
    folder = write_folder(tmp_path / "out", rank_report(device_uuid="another"))
    lines = text_lines(run(folder))
    assert any("cut into slices (MIG)" in line for line in lines)
    assert any("counts 2 uncorrected memory errors" in line for line in lines)
    assert any("was computing before the run (97%)" in line for line in lines)
    (kept,) = read_lock_document(folder)["measurements"]
    (condition,) = kept["conditions"]["cards"]
    assert (condition["mig"], condition["ecc"], condition["uncorrected_errors"]) == (True, True, 2)
    assert UUID not in json.dumps(kept), "the lock names no card"


def test_what_the_environment_says_to_torch_is_noted_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    folder = write_folder(tmp_path / "out", rank_report())
    lines = text_lines(run(folder))
    assert any("memory or time may differ for it: CUBLAS_WORKSPACE_CONFIG=:4096:8" in line for line in lines)
    (kept,) = read_lock_document(folder)["measurements"]
    assert kept["conditions"]["variables"] == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_a_card_of_another_size_or_name_is_noted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report(capacity_bytes=10 * GIB, peak_gib=8.0))
    document = read_lock_document(folder) | {"hardware": {"name": "NVIDIA A100", "capacity_bytes": 39 * GIB}}
    write_lock(folder, document)
    assert any("29.00 GiB less than the planned NVIDIA A100" in line for line in text_lines(run(folder)))
    write_lock(folder, document | {"hardware": {"name": "NVIDIA A100", "capacity_bytes": 10 * GIB}})
    assert any(
        "measured on NVIDIA GeForce RTX 4090, planned for NVIDIA A100" in line for line in text_lines(run(folder))
    )


def test_memory_that_did_not_settle_is_noted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report(settled=False, reserved_bytes_by_step=[1, 2, 3]))
    write_lock(folder, read_lock_document(folder) | {"hardware": {"name": "", "capacity_bytes": 23 * GIB}})
    assert "note: rank 0: reserved memory still grew at step 3" in text_lines(run(folder))


# ---- accounts and time ----


def test_what_a_rank_holds_stands_beside_the_ledger_and_names_the_entry_that_is_off(tmp_path: Path) -> None:
    held = {
        "parameters": {"cuda": 9 * GIB, "cpu": 0},
        "optimizer_states": {"cuda": 5 * GIB, "cpu": 0},
        "gradients": {"cuda": 0, "cpu": 0},
    }
    outcome = run(write_folder(tmp_path / "out", rank_report(held_bytes=held)))
    parameters, states = outcome.ranks[0].accounts
    assert (parameters.account, parameters.agrees, states.difference_bytes) == ("parameters", True, GIB)
    lines = text_lines(outcome)
    assert "  holds parameters 9.00 GiB on the gpu: as the ledger says" in lines
    off = "  holds optimizer_states 5.00 GiB on the gpu: the ledger books 4.00 GiB (optimizer_states-of-4), +1.00 GiB"
    assert f"{off} from it" in lines


def test_on_a_cpu_states_are_held_against_card_and_host_together(tmp_path: Path) -> None:
    reports = [cpu_report(rank, 2, held_bytes={"optimizer_states": {"cpu": 7 * GIB}}) for rank in range(2)]
    folder = write_folder(tmp_path / "out", *reports, settings={"gpus_per_node": 2})
    document = read_lock_document(folder)
    document["ledger"]["host"] = {"required_bytes": 9 * GIB, "entries": [entry("optimizer_states", 6, ["step"])]}
    write_lock(folder, document)
    (account,) = run(folder, device="cpu").ranks[1].accounts
    assert (account.place, account.ledger_bytes, account.agrees) == ("cpu", 7 * GIB, True)  # 4 and half of 6
    document["plan"]["settings"]["precision"] = "fp16"
    write_lock(folder, document)
    assert run(folder, device="cpu").ranks[0].accounts == ()


def with_clock(folder: Path, *, budget: float | None) -> Path:
    document = read_lock_document(folder)
    document["clock"] |= {"total_seconds": 1000.0}
    document["plan"]["total_steps"] = 400
    document["budget"]["seconds"] = budget
    write_lock(folder, document)
    return folder


def test_the_measured_pace_is_carried_to_the_whole_run_and_held_against_the_budget(tmp_path: Path) -> None:
    slow = rank_report(step_seconds=[9.0, 3.0, 3.0])
    outcome = run(with_clock(write_folder(tmp_path / "slow", slow), budget=1200.0))
    assert (outcome.run_seconds, outcome.time_holds) == (1500.0, False)  # 3 s where the clock said 2
    (finding,) = outcome.diagnostics
    assert finding.code == "measured-time-over-budget"
    assert "a step takes 3.00 s, the clock said 2.00 s: 400 of them make the run 25.0 min" in finding.message
    assert not outcome.over_memory
    within = run(with_clock(write_folder(tmp_path / "within", slow), budget=1600.0))
    assert (within.exit_code, within.time_holds) == (ExitCode.OK, True)
    assert any("within the budget of" in line for line in text_lines(within))
    without = run(with_clock(write_folder(tmp_path / "without", slow), budget=None))
    assert (without.exit_code, without.run_seconds, without.time_holds) == (ExitCode.OK, 1500.0, None)


# ---- snapshots ----

FORWARD = [{"filename": "/v/transformers/models/llama/modeling_llama.py", "line": 1, "name": "forward"}]
LOAD = [{"filename": "/v/torch/nn/modules/module.py", "line": 9, "name": "convert"}]
STEP = [{"filename": "/v/torch/optim/adamw.py", "line": 160, "name": "_init_group"}]


def history(*actions: tuple[str, int, int, Any]) -> list[dict[str, Any]]:
    return [{"action": a, "addr": at, "size": size, "frames": frames or []} for a, at, size, frames in actions]


def snapshot(live: dict[int, tuple[int, Any]], trace: list[dict[str, Any]]) -> bytes:
    blocks = [
        {"address": at, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
        for at, (size, frames) in live.items()
    ]
    segment = {"device": 1, "address": 0, "total_size": 10 * GIB, "blocks": blocks}
    return pickle.dumps({"segments": [segment], "device_traces": [[], trace]}, protocol=4)


def test_a_history_is_undone_to_the_peak() -> None:
    trace = history(
        ("alloc", 1, 9 * GIB, LOAD),
        ("alloc", 2, 3 * GIB, FORWARD),
        ("segment_alloc", 2, 99 * GIB, None),
        ("alloc", 3, 2 * GIB, FORWARD),  # the peak: 14
        ("free_requested", 3, 2 * GIB, None),
        ("free_completed", 3, 2 * GIB, None),
        ("free_requested", 2, 3 * GIB, None),
        ("alloc", 3, 4 * GIB, STEP),
    )
    found = attribution(snapshot({1: (9 * GIB, LOAD), 3: (4 * GIB, STEP)}, trace))
    assert (found.moment, found.allocated_bytes) == ("peak", 14 * GIB)
    assert found.accounts == {"parameters": 9 * GIB, "activations": 5 * GIB}


def test_a_history_that_lost_its_beginning_still_tells_sizes() -> None:
    trace = history(("free_requested", 2, 3 * GIB, None), ("alloc", 3, GIB, STEP))
    found = attribution(snapshot({1: (9 * GIB, LOAD), 3: (GIB, STEP)}, trace))
    assert found.accounts == {"parameters": 9 * GIB, "unattributed": 3 * GIB}


def test_a_failure_is_told_as_it_was_and_a_snapshot_without_history_too() -> None:
    live = {1: (9 * GIB, LOAD), 2: (GIB, FORWARD)}
    failed = attribution(snapshot(live, history(("alloc", 2, GIB, FORWARD), ("oom", 0, 7 * GIB, None))))
    assert (failed.moment, failed.failed_bytes, failed.allocated_bytes) == ("failure", 7 * GIB, 10 * GIB)
    assert attribution(snapshot(live, [])).accounts == failed.accounts


def test_out_of_memory_names_the_account_above_the_ledger_from_the_snapshot(tmp_path: Path) -> None:
    error = {"kind": "out-of-memory", "phase": "first_step", "message": "CUDA out of memory. Tried to allocate 7 GiB"}
    lost = {"kind": "exception", "phase": "first_step", "message": "NCCL: connection closed"}
    data = snapshot({1: (9 * GIB, LOAD), 2: (11 * GIB, FORWARD)}, history(("oom", 0, 7 * GIB, None)))
    launcher = RUN + 'cp "$here"/reports/*.json "$probe"/; cp "$here/../rank1.pickle" "$probe"/; exit 1\n'
    (tmp_path / "rank1.pickle").write_bytes(data)
    reports = (rank_report(0, 2, error=lost), rank_report(1, 2, peak_gib=22.0, error=error))
    folder = write_folder(tmp_path / "out", *reports, launcher=launcher, settings={"gpus_per_node": 2})
    outcome = run(folder, read_snapshot=attribution, snapshots=tmp_path / "kept")
    (finding,) = outcome.diagnostics  # not the rank that was lost for it
    assert finding.code == "out-of-memory"
    assert "In use then: activations 11.00 GiB, parameters 9.00 GiB." in finding.message
    assert "Above the ledger is activations: it books 6.00 GiB." in finding.message
    assert any("modeling_llama.py:1 forward" in line for line in finding.context)
    assert (tmp_path / "kept" / "rank1.pickle").read_bytes() == data
    assert outcome.over_memory
    json.dumps(outcome.document(), allow_nan=False)


def test_a_snapshot_that_cannot_be_read_does_not_spoil_the_verdict(tmp_path: Path) -> None:
    launcher = RUN + 'cp "$here"/reports/*.json "$probe"/; echo cposix > "$probe/rank0.pickle"\n'
    lines: list[str] = []
    settings = Settings(device="cuda", resume=False, read_snapshot=attribution)
    folder = write_folder(tmp_path / "out", rank_report(), launcher=launcher)
    assert verify(folder, settings=settings, on_line=lines.append).passed
    assert any("rank0.pickle says nothing" in line for line in lines)


# ---- resuming ----

TWICE = (
    RUN.replace("--probe)", '--resume) resumed=1; shift ;;\n    --max-steps) echo "steps $2"; shift 2 ;;\n    --probe)')
    + 'cp "$here"/reports/${resumed:+resumed-}rank0.json "$probe"/rank0.json\n'
)


def twice(folder: Path, resumed: dict[str, Any], **first: Any) -> Path:
    launcher = TWICE + f"[[ -z ${{resumed:-}} ]] || cat > \"$probe/rank0.json\" <<'END'\n{json.dumps(resumed)}\nEND\n"
    return write_folder(folder, rank_report(**first), launcher=launcher.replace("${resumed:+resumed-}", ""))


def test_a_checkpoint_is_resumed_in_new_processes_with_one_step_more(tmp_path: Path) -> None:
    phases = {
        "load": {"allocated_bytes": 19 * GIB, "reserved_bytes": 19 * GIB},
        "resume": {"allocated_bytes": 13 * GIB, "reserved_bytes": 14 * GIB},
        "resumed_step": {"allocated_bytes": 15 * GIB, "reserved_bytes": 18 * GIB},
    }
    resumed = rank_report(phases=phases, device_used_bytes=int(18.5 * GIB), step_seconds=[4.0], losses=[2.0])
    lines: list[str] = []
    folder = twice(tmp_path / "out", resumed)
    outcome = verify(folder, settings=Settings(device="cuda"), on_line=lines.append)
    assert [line for line in lines if line.startswith("steps")] == ["steps 4", "steps 5"]
    measured = {phase.phase: phase.reserved_bytes // GIB for phase in outcome.ranks[0].phases}
    assert (measured["load"], measured["resume"], measured["resumed_step"]) == (13, 14, 18)
    assert outcome.required_bytes == int(18.5 * GIB)
    assert outcome.steps == 4
    assert outcome.step_seconds == pytest.approx(2.1)


def test_a_failure_to_resume_fails_and_leaves_the_lock(tmp_path: Path) -> None:
    error = {"kind": "out-of-memory", "phase": "resume", "message": "CUDA out of memory"}
    folder = twice(tmp_path / "out", rank_report(error=error, losses=[]))
    before = (folder / "memc.lock").read_bytes()
    outcome = verify(folder, settings=Settings(device="cuda"), on_line=lambda line: None)
    assert [finding.code for finding in outcome.diagnostics] == ["out-of-memory"]
    assert "ran out of memory in resume" in outcome.diagnostics[0].message
    assert (folder / "memc.lock").read_bytes() == before


# ---- several nodes ----


def test_each_node_answers_for_its_own_ranks(tmp_path: Path) -> None:
    promise = read_lock(write_folder(tmp_path / "out", settings={"gpus_per_node": 8, "nodes": 2}))
    meeting = {"MAIN_PROCESS_IP": "10.0.0.1"}
    assert ranks_here(promise, {"MACHINE_RANK": "0", **meeting}) == range(8)
    assert ranks_here(promise, {"SLURM_NODEID": "1", "MASTER_ADDR": "10.0.0.1"}) == range(8, 16)
    for given in (
        {},
        meeting,
        {"MACHINE_RANK": "2", **meeting},
        {"MACHINE_RANK": "x", **meeting},
        {"MACHINE_RANK": "1"},
    ):
        with pytest.raises(MemcError, match="does not say which of them this is") as caught:
            ranks_here(promise, given)
        assert caught.value.diagnostics[0].code == "verify-which-node"


NODE = RUN + 'cp "$here/reports/rank$MACHINE_RANK.json" "$probe"/\n'


def test_the_calls_of_all_nodes_make_one_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAIN_PROCESS_IP", "127.0.0.1")
    reports = (rank_report(0, 2), rank_report(1, 2, peak_gib=17.0, step_seconds=[9.0, 3.0, 3.0, 3.0]))
    folder = write_folder(tmp_path / "out", *reports, launcher=NODE, settings={"nodes": 2})
    outcomes = []
    for node in ("0", "1"):
        monkeypatch.setenv("MACHINE_RANK", node)
        outcomes.append(run(folder))
    assert [outcome.passed for outcome in outcomes] == [True, True]
    assert "ranks: 1 of 2 are measured; each node answers for its own" in text_lines(outcomes[0])
    assert "ranks: 2 of 2 are measured; each node answers for its own" in text_lines(outcomes[1])
    (kept,) = read_lock_document(folder)["measurements"]
    assert [rank["rank"] for rank in kept["ranks"]] == [0, 1]
    assert (kept["required_bytes"], kept["step_seconds"], kept["fits"]) == (int(17.5 * GIB), 3.0, True)
    monkeypatch.setenv("MACHINE_RANK", "0")
    run(folder)
    assert [len(kept["ranks"]) for kept in read_lock_document(folder)["measurements"]] == [2, 1]


def test_measurements_of_other_conditions_do_not_join() -> None:
    first = {"ranks": [{"rank": 0}], "steps": 4, "world_size": 2, "judged": True, "fits": True}
    second = first | {"ranks": [{"rank": 1}]}
    assert joined_measurement(first, second) is not None
    assert joined_measurement(first, second | {"steps": 5}) is None
    assert joined_measurement(first, first) is None
    assert joined_measurement("junk", second) is None


def test_two_calls_at_once_both_stand_in_the_lock(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "out", rank_report(), launcher=RUN + 'sleep 0.3; cp "$here"/reports/*.json "$probe"/\n'
    )
    threads = [threading.Thread(target=run, args=(folder,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_lock_document(folder)["measurements"]) == 4


# ---- without the model ----


def test_without_weights_the_model_is_found_by_its_name_from_the_catalogue(tmp_path: Path) -> None:
    launcher = (
        RUN + 'cp "$here"/reports/*.json "$probe"/; ls -d HuggingFaceTB/*/config.json; echo "offline $HF_HUB_OFFLINE"\n'
    )
    folder = write_folder(tmp_path / "out", cpu_report(), launcher=launcher)
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    write_lock(folder, read_lock_document(folder) | {"run": {"model": name}, "model": {"key": name}})
    lines: list[str] = []
    settings = Settings(device="cpu", random_weights=True, resume=False)
    assert verify(folder, settings=settings, on_line=lines.append).passed
    assert f"{name}/config.json" in lines
    assert "offline 1" in lines
    assert not list(folder.glob(".memc-*"))
