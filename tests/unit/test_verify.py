"""verify: verdicts, measurements and refusals, each through a real launcher."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from memc.errors import ExitCode, MemcError
from memc.verify import Settings, Verification, text_lines, verify
from verify_folder import GIB, RUN, cpu_report, entry, rank_report, read_lock_document, write_folder, write_lock


def run(folder: Path, device: str = "cuda", **options: object) -> Verification:
    settings = Settings(**({"device": device, "resume": False} | options))  # type: ignore[arg-type]
    return verify(folder, settings=settings, on_line=lambda line: None)


def rewrite(folder: Path, file: Path, text: str) -> None:
    """Changes a file as memc would: its digest in the lock too."""
    file.write_text(text, encoding="utf-8")
    document = read_lock_document(folder)
    document["files"][file.relative_to(folder).as_posix()] = hashlib.sha256(text.encode()).hexdigest()
    write_lock(folder, document)


def only_code(outcome: Verification) -> str:
    assert outcome.exit_code is ExitCode.VERIFICATION_FAILED
    (finding,) = outcome.diagnostics
    return finding.code


def assert_untouched(folder: Path, before: bytes) -> None:
    assert (folder / "memc.lock").read_bytes() == before
    assert not list(folder.glob(".memc-*"))


# ---- a completed run ----


def test_a_peak_within_the_budget_fits_and_is_kept_in_the_lock(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report())
    outcome = run(folder)
    assert outcome.exit_code is ExitCode.OK
    assert (outcome.judged, outcome.fits, outcome.within_interval) == (True, True, True)
    assert outcome.required_bytes == 16 * GIB  # 15.5 reserved + 0.5 that the driver counts beside it
    assert outcome.headroom_bytes == 4 * GIB
    assert outcome.difference_bytes == -GIB
    assert outcome.step_seconds == pytest.approx(2.1)  # the first step is warm-up
    assert outcome.step_time_matches is True
    (kept,) = read_lock_document(folder)["measurements"]
    assert kept["grade"] == "measured"
    assert kept["fits"] is True
    assert kept["device"] == "cuda"
    assert kept["driver"] == "570.86"
    assert kept["steps"] == 4
    assert kept["world_size"] == 1
    assert kept["versions"] == {"torch": "2.13.0", "transformers": "5.24.0"}
    assert kept["ranks"][0]["phases"]["steady"] == {"allocated_bytes": 15 * GIB, "reserved_bytes": int(15.5 * GIB)}
    assert str(tmp_path) not in json.dumps(kept)
    assert not list(folder.glob(".memc-*"))


def test_phases_are_compared_with_the_ledger_phases_that_happen_in_them(tmp_path: Path) -> None:
    outcome = run(write_folder(tmp_path / "out", rank_report()))
    compared = {phase.phase: (phase.ledger_bytes, phase.difference_bytes) for phase in outcome.ranks[0].phases}
    assert compared == {
        "load": (13 * GIB, 0),
        "first_step": (15 * GIB, 0),
        "steady": (15 * GIB, 0),
        "evaluate": (14 * GIB, -GIB),
        "save": (13 * GIB, 0),
    }


def test_a_peak_above_the_budget_fails_and_names_phase_account_and_a_target(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report(peak_gib=21.0))
    outcome = run(folder)
    assert outcome.fits is False
    assert only_code(outcome) == "measured-peak-over-budget"
    shown = str(outcome.diagnostics[0])
    assert "rank 0 needs 21.50 GiB (21.00 GiB reserved, 0.50 GiB outside the allocator)" in shown
    assert "1.50 GiB above the budget of 20.00 GiB" in shown
    assert "peaks in first_step" in shown
    assert "The largest account there is parameters: the ledger books 9.00 GiB for it." in shown
    assert "memory.target to 15.5GiB" in shown  # 20 less the 4.5 by which 21.5 exceeds the promised 17
    assert read_lock_document(folder)["measurements"][0]["fits"] is False


def test_the_budget_is_the_largest_need_that_fits(tmp_path: Path) -> None:
    exactly = run(write_folder(tmp_path / "exact", rank_report(peak_gib=19.5)))
    assert (exactly.required_bytes, exactly.fits) == (20 * GIB, True)
    above = rank_report(peak_gib=19.5, device_used_bytes=20 * GIB + 1)
    assert run(write_folder(tmp_path / "above", above)).fits is False


def test_without_the_drivers_count_the_ledger_says_what_lies_outside(tmp_path: Path) -> None:
    outcome = run(write_folder(tmp_path / "out", rank_report(device_used_bytes=None)))
    assert outcome.ranks[0].outside_allocator_bytes == GIB
    assert outcome.required_bytes == int(16.5 * GIB)


def test_the_worst_rank_decides(tmp_path: Path) -> None:
    reports = (rank_report(0, 2), rank_report(1, 2, peak_gib=20.0, step_seconds=[9.0, 3.0, 3.0]))
    outcome = run(write_folder(tmp_path / "out", *reports, settings={"gpus_per_node": 2}))
    assert "rank 1 needs" in outcome.diagnostics[0].message
    assert [rank.headroom_bytes for rank in outcome.ranks] == [4 * GIB, -GIB // 2]
    assert outcome.step_seconds == 3.0
    assert outcome.step_time_matches is False


def test_of_several_ranks_above_the_budget_the_worst_is_named(tmp_path: Path) -> None:
    peaks = (20.0, 22.0, 21.0)
    reports = (rank_report(rank, 3, peak_gib=peak) for rank, peak in enumerate(peaks))
    outcome = run(write_folder(tmp_path / "out", *reports, settings={"gpus_per_node": 3}))
    assert "rank 1 needs 22.50 GiB" in outcome.diagnostics[0].message
    assert outcome.required_bytes == int(22.5 * GIB)


def test_a_second_measurement_is_added_and_the_rest_of_the_lock_stays(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report())
    before = read_lock_document(folder)
    run(folder)
    report = folder / "reports" / "rank0.json"
    shorter = rank_report(step_seconds=[5.0, 2.0])
    rewrite(folder, report, json.dumps(shorter))
    run(folder, steps=2)
    after = read_lock_document(folder)
    assert [kept["steps"] for kept in after["measurements"]] == [4, 2]
    assert after | {"measurements": [], "files": 0} == before | {"files": 0}
    text = (folder / "memc.lock").read_text(encoding="utf-8")
    write_lock(folder, after)
    assert (folder / "memc.lock").read_text(encoding="utf-8") == text


def test_the_launcher_runs_from_the_current_folder_with_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "out", cpu_report())
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    settings = Settings(device="cpu", steps=3, random_weights=True, resume=False)
    verify(Path("out"), settings=settings, on_line=lines.append)
    assert lines == [
        "argument --max-steps",
        "argument 3",
        "argument --settle",
        "argument 12",
        "argument --device",
        "argument cpu",
        "argument --random-weights",
        f"started from {tmp_path}",
    ]
    assert folder.is_dir()


def test_on_a_cpu_memory_is_not_judged_but_the_run_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", cpu_report(0, 2), cpu_report(1, 2), settings={"gpus_per_node": 2})
    outcome = run(folder, device="cpu")
    assert outcome.exit_code is ExitCode.OK
    assert (outcome.judged, outcome.fits, outcome.required_bytes, outcome.step_time_matches) == (
        False,
        None,
        None,
        None,
    )
    assert "memory was not judged" in text_lines(outcome)[0]
    assert read_lock_document(folder)["measurements"][0]["judged"] is False


# ---- a run that fails ----


@pytest.mark.parametrize("losses", [[2.0, None], [], [float("nan")]])
def test_a_loss_that_is_no_finite_number_fails(tmp_path: Path, losses: list[float | None]) -> None:
    folder = write_folder(tmp_path / "out", cpu_report(losses=losses))
    before = (folder / "memc.lock").read_bytes()
    outcome = run(folder, device="cpu")
    assert only_code(outcome) == "loss-not-finite"
    json.loads(json.dumps(outcome.document(), allow_nan=False))
    assert_untouched(folder, before)


def test_out_of_memory_names_phase_account_and_capacity(tmp_path: Path) -> None:
    error = {
        "kind": "out-of-memory",
        "phase": "first_step",
        "message": "CUDA out of memory. Tried to allocate 2.00 GiB",
    }
    report = rank_report(1, 2, peak_gib=22.0, error=error, losses=[])
    launcher = RUN + 'cp "$here"/reports/*.json "$probe"/; echo "Traceback: rank 1"; exit 1\n'
    folder = write_folder(tmp_path / "out", report, launcher=launcher, settings={"gpus_per_node": 2})
    before = (folder / "memc.lock").read_bytes()
    outcome = run(folder)
    assert only_code(outcome) == "out-of-memory"
    shown = str(outcome.diagnostics[0])
    assert "rank 1 of 2 ran out of memory in first_step, with 22.50 GiB of 23.00 GiB in use" in shown
    assert "The largest account there is parameters: the ledger books 9.00 GiB for it." in shown
    assert "Tried to allocate 2.00 GiB" in shown
    assert "memory.target to 14.0GiB" in shown
    assert "Traceback: rank 1" in outcome.log_tail
    assert_untouched(folder, before)


def test_out_of_memory_in_evaluation_names_the_account_of_that_phase(tmp_path: Path) -> None:
    error = {"kind": "out-of-memory", "phase": "evaluate", "message": "CUDA out of memory"}
    folder = write_folder(tmp_path / "out", rank_report(error=error))
    document = read_lock_document(folder)
    document["ledger"]["gpu"]["entries"].append(entry("activations", 7, ["evaluate"]))
    write_lock(folder, document)
    (finding,) = run(folder).diagnostics
    assert "out of memory in evaluate" in finding.message
    assert "The largest account there is activations: the ledger books 12.00 GiB for it." in finding.message


def test_an_exception_in_a_rank_is_shown(tmp_path: Path) -> None:
    error = {"kind": "exception", "phase": "load", "message": "PlanError: there is no data file data/train.jsonl"}
    folder = write_folder(tmp_path / "out", rank_report(error=error, losses=[], phases={}))
    outcome = run(folder)
    assert only_code(outcome) == "rank-failed"
    assert "rank 0 of 1 stopped in load" in outcome.diagnostics[0].message
    assert outcome.diagnostics[0].context == ("PlanError: there is no data file data/train.jsonl",)


def test_a_rank_without_report_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report(0, 3), rank_report(2, 3), settings={"gpus_per_node": 3})
    before = (folder / "memc.lock").read_bytes()
    outcome = run(folder)
    assert only_code(outcome) == "rank-report-missing"
    assert "rank 1 wrote no report" in outcome.diagnostics[0].message
    assert_untouched(folder, before)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "rank0.json cannot be read"),
        ("[]", "rank0.json cannot be read"),
        ('{"schema": "memc/probe/9"}', "expected 'memc/probe/1'"),
        ('{"schema": "memc/probe/1", "device": "cpu"}', "rank0.json lacks"),
        (json.dumps(rank_report(5)), "it says rank 5"),
        (json.dumps(rank_report(phases={"warmup": None})), "unknown phase 'warmup'"),
    ],
)
def test_a_report_that_cannot_be_used_is_named(tmp_path: Path, content: str, said: str) -> None:
    launcher = RUN + f"cat > \"$probe\"/rank0.json <<'END'\n{content}\nEND\n"
    outcome = run(write_folder(tmp_path / "out", launcher=launcher))
    assert only_code(outcome) == "rank-report-missing"
    assert said in outcome.diagnostics[0].message


def test_a_crash_shows_the_last_lines_and_leaves_the_lock(tmp_path: Path) -> None:
    launcher = RUN + 'echo half > "$probe/checkpoint"; echo "ImportError: no module named trl" >&2; exit 7\n'
    folder = write_folder(tmp_path / "out", launcher=launcher)
    before = (folder / "memc.lock").read_bytes()
    outcome = run(folder)
    assert only_code(outcome) == "launcher-failed"
    assert "launch.sh exited 7" in outcome.diagnostics[0].message
    assert "ImportError: no module named trl" in outcome.diagnostics[0].context
    assert_untouched(folder, before)


def test_a_killed_launcher_says_which_signal(tmp_path: Path) -> None:
    outcome = run(write_folder(tmp_path / "out", launcher=RUN + "kill -KILL $$\n"))
    assert "ended by signal 9" in outcome.diagnostics[0].message


def test_a_world_of_the_wrong_size_fails(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report(0, 1), rank_report(1, 1), settings={"gpus_per_node": 2})
    assert only_code(run(folder)) == "wrong-world-size"


def test_a_run_on_the_cpu_is_no_measurement_of_a_gpu(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", cpu_report())
    assert only_code(run(folder, device="cuda")) == "ran-without-gpu"
    assert read_lock_document(folder)["measurements"] == []


def test_a_rank_without_peaks_is_not_judged_as_fitting(tmp_path: Path) -> None:
    outcome = run(write_folder(tmp_path / "out", rank_report(phases={})))
    assert only_code(outcome) == "peaks-not-reported"
    assert outcome.fits is None


# ---- before anything is started ----


def refused(folder: Path, **options: object) -> MemcError:
    with pytest.raises(MemcError) as caught:
        run(folder, **options)  # type: ignore[arg-type]
    return caught.value


def test_edited_and_missing_files_stop_with_exit_4_and_are_all_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report())
    with (folder / "launch.sh").open("a", encoding="utf-8") as launcher:
        launcher.write(f"touch {tmp_path}/started\n")
    (folder / "reports/rank0.json").unlink()
    error = refused(folder)
    assert error.exit_code is ExitCode.STALE
    assert [(finding.code, finding.message.split()[0]) for finding in error.diagnostics] == [
        ("generated-file-edited", "launch.sh"),
        ("generated-file-missing", "reports/rank0.json"),
    ]
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (None, "lock-missing", "holds no memc.lock"),
        ("", "lock-malformed", "not JSON"),
        ('{"schema": ', "lock-malformed", "not JSON"),
        ("[]", "lock-foreign", "names no schema"),
        ('{"version": 1}', "lock-foreign", "names no schema"),
        ('{"schema": "poetry/2"}', "lock-foreign", "'poetry/2'"),
        ('{"schema": "memc/lock/1"}', "lock-malformed", "lacks 'ledger'"),
        ('{"schema": "memc/lock/1", "ledger": 3}', "lock-malformed", "malformed"),
    ],
)
def test_a_lock_that_is_not_one_says_so(tmp_path: Path, content: str | None, code: str, said: str) -> None:
    if content is not None:
        (tmp_path / "memc.lock").write_text(content, encoding="utf-8")
    error = refused(tmp_path)
    assert error.exit_code is ExitCode.USAGE
    assert error.diagnostics[0].code == code
    assert said in error.diagnostics[0].message


def test_a_lock_of_bytes_or_with_a_text_for_a_size_says_so(tmp_path: Path) -> None:
    (tmp_path / "memc.lock").write_bytes(b"\xff\xfe\x00")
    assert refused(tmp_path).diagnostics[0].code == "lock-unreadable"
    folder = write_folder(tmp_path / "out", rank_report())
    document = read_lock_document(folder)
    document["budget"]["gpu_bytes"] = "20GiB"
    write_lock(folder, document)
    assert "gpu_bytes must be a whole number of bytes" in refused(folder).diagnostics[0].message


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_a_lock_cannot_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "out", rank_report())
    document = read_lock_document(folder)
    document["files"][name] = "0" * 64
    write_lock(folder, document)
    assert "lies outside the folder" in refused(folder).diagnostics[0].message


def test_many_nodes_and_bad_arguments_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report(), settings={"nodes": 2})
    assert refused(folder).diagnostics[0].code == "verify-which-node"
    assert refused(folder, steps=0).diagnostics[0].code == "verify-steps"
    assert refused(folder, timeout_seconds=0).diagnostics[0].code == "verify-timeout"
    assert refused(folder, device="tpu").diagnostics[0].code == "verify-device"


FAKE_DRIVER = """
int cuInit(unsigned int flags) { return %(init)d; }
int cuDeviceGetCount(int *count) { *count = %(count)d; return 0; }
"""

VERIFY_AUTO = """
import sys
from pathlib import Path
from memc.errors import MemcError
from memc.verify import Settings, verify
try:
    outcome = verify(Path(sys.argv[1]), settings=Settings(resume=False), on_line=print)
except MemcError as error:
    print(error)
    sys.exit(error.exit_code)
sys.exit(outcome.exit_code)
"""


def verify_with_driver(tmp_path: Path, folder: Path, *, init: int, count: int) -> subprocess.CompletedProcess[str]:
    """Runs verify in a process whose CUDA driver library is one that reports `count` devices."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    source = FAKE_DRIVER % {"init": init, "count": count}
    build = ["g++", "-shared", "-fPIC", "-x", "c", "-", "-o", str(libraries / "libcuda.so.1")]
    subprocess.run(build, input=source, text=True, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
    command = [sys.executable, "-c", VERIFY_AUTO, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_machine_without_a_gpu_says_so_and_offers_the_cpu(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report())
    done = verify_with_driver(tmp_path, folder, init=100, count=0)
    assert done.returncode == ExitCode.VERIFICATION_FAILED, done.stderr
    assert "error[no-gpu]: this machine offers no GPU" in done.stdout
    assert "cuInit of libcuda.so.1 returned error 100" in done.stdout
    assert f"memc verify {folder} --device cpu" in done.stdout


def test_fewer_gpus_than_planned_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report(), settings={"gpus_per_node": 4})
    done = verify_with_driver(tmp_path, folder, init=0, count=2)
    assert done.returncode == ExitCode.VERIFICATION_FAILED, done.stderr
    assert "the plan runs on 4 GPUs of one node; this machine offers 2" in done.stdout


def test_with_enough_gpus_the_run_is_judged(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report())
    done = verify_with_driver(tmp_path, folder, init=0, count=1)
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    assert "--device" not in done.stdout  # the launcher finds the GPU by itself


# ---- what a person and a program read ----


def test_the_text_says_verdict_interval_step_and_peaks(tmp_path: Path) -> None:
    lines = text_lines(run(write_folder(tmp_path / "out", rank_report())))
    assert lines == [
        "fits: 16.00 GiB of 20.00 GiB, headroom 4.00 GiB (4 steps on 1 × NVIDIA GeForce RTX 4090)",
        "ledger: promised 17.00 GiB ± 1.00 GiB; measured −1.00 GiB from it, inside the interval",
        "step: 2.10 s, as the clock said: 2.00 s (+5%)",
        "",
        "rank 0: 15.50 GiB reserved + 0.50 GiB outside = 16.00 GiB, headroom 4.00 GiB",
        "  load          allocated  13.00 GiB  reserved  13.00 GiB  ledger  13.00 GiB  difference    +0.0 MiB",
        "  first_step    allocated  15.00 GiB  reserved  15.50 GiB  ledger  15.00 GiB  difference    +0.0 MiB",
        "  steady        allocated  15.00 GiB  reserved  15.50 GiB  ledger  15.00 GiB  difference    +0.0 MiB",
        "  evaluate      allocated  13.00 GiB  reserved  15.50 GiB  ledger  14.00 GiB  difference   −1.00 GiB",
        "  save          allocated  13.00 GiB  reserved  15.50 GiB  ledger  13.00 GiB  difference    +0.0 MiB",
        "  loss 2.5 → 2.2, 3,900 tokens/s, host memory 3.00 GiB",
    ]


def test_the_document_is_json_with_verdict_ranks_and_diagnostics(tmp_path: Path) -> None:
    outcome = run(write_folder(tmp_path / "out", rank_report(peak_gib=21.0)))
    document = json.loads(json.dumps(outcome.document(), allow_nan=False))
    assert document["schema"] == "memc/verification/1"
    assert (document["passed"], document["fits"], document["exit_code"]) == (False, False, 5)
    assert document["ranks"][0]["headroom_bytes"] == int(-1.5 * GIB)
    assert document["diagnostics"][0]["code"] == "measured-peak-over-budget"
    assert document["diagnostics"][0]["hint"]


def verify_command(folder: Path, *options: str, limit_bytes: int = -1) -> subprocess.CompletedProcess[str]:
    """Runs `memc verify` in a process of its own, which may write no file beyond a size."""

    def limited() -> None:
        if limit_bytes >= 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    command = [sys.executable, "-m", "memc", "verify", str(folder), "--device", "cuda", "--no-resume", *options]
    return subprocess.run(command, preexec_fn=limited, capture_output=True, text=True, check=False)


def test_a_folder_without_room_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report())
    before = (folder / "memc.lock").read_bytes()
    done = verify_command(folder, limit_bytes=1000)
    assert done.returncode == ExitCode.USAGE
    assert f"error[verify-folder]: nothing can be written below {folder}: File too large" in done.stderr
    assert "started from" not in done.stderr
    assert_untouched(folder, before)


def test_snapshots_that_cannot_be_kept_are_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "out", rank_report())
    (tmp_path / "file").touch()
    done = verify_command(folder, "--snapshot", str(tmp_path / "file" / "below"))
    assert done.returncode == ExitCode.USAGE
    assert f"nothing can be written below {tmp_path / 'file' / 'below'}: Not a directory" in done.stderr
    assert "started from" not in done.stderr


def test_a_measurement_that_cannot_be_kept_is_shown_and_said_to_be_lost(tmp_path: Path) -> None:
    """The disk is full by the time the run ends: here, no file of the process that verifies may grow any more."""
    fills = "import resource; resource.prlimit($PPID, resource.RLIMIT_FSIZE, (100, 100))"
    launcher = RUN + f'cp "$here"/reports/*.json "$probe"/; python3 -c "{fills}"\n'
    folder = write_folder(tmp_path / "out", rank_report(), launcher=launcher)
    before = (folder / "memc.lock").read_bytes()
    done = verify_command(folder)
    assert done.returncode == ExitCode.VERIFICATION_FAILED
    assert done.stdout.startswith("fits: 16.00 GiB of 20.00 GiB")
    assert "error[measurement-not-kept]: the run went to its end, but memc.lock could not be written" in done.stdout
    assert_untouched(folder, before)


def test_a_file_in_the_place_of_the_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").touch()
    finding = refused(tmp_path / "spec.yaml").diagnostics[0]
    assert finding.code == "lock-missing"
    assert "is a file, and no folder" in finding.message
