"""Diagnosis of logs, tables and symptoms: every wording, in every disguise that a log gives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from diagnose_logs import (
    FORWARD,
    GIB,
    LOGS,
    OOM_13,
    OOM_25,
    OOM_FRAGMENTED,
    STEP,
    Log,
)
from memc.cli import main
from memc.diagnose import SYMPTOMS, Cause, diagnose
from memc.ledger.entries import Account

SPEC = """\
model: Qwen/Qwen2.5-7B-Instruct
data: {train: t.jsonl, max_length: 4096, samples: 1000, mean_tokens: 900}
method: lora
hardware: {gpu: rtx-4090, host_memory: 64GiB}
"""


def check(data: bytes, log: Log) -> None:
    found = diagnose(data)
    assert [finding.kind for finding in found] == [log.kind]
    (finding,) = found
    assert (finding.cause, finding.account, finding.phase) == (log.cause, log.account, log.phase), finding.sentence
    assert {name: finding.figures.get(name) for name in log.figures} == log.figures
    assert finding.remedies
    assert finding.evidence
    text = data.decode("utf-16" if data.startswith(b"\xff\xfe") else "utf-8", "replace")
    for item in finding.evidence:
        assert 1 <= item.line <= text.count("\n") + 1
        assert item.text.isprintable()


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_every_wording(log: Log) -> None:
    check(log.text.encode(), log)


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
@pytest.mark.parametrize("disguise", ["crlf", "colours", "middle", "utf-16", "progress"])
def test_every_wording_in_disguise(log: Log, disguise: str) -> None:
    if disguise == "crlf":
        data = log.text.replace("\n", "\r\n").encode()
    elif disguise == "colours":
        data = "".join(f"\x1b[31m{line}\x1b[0m\x1b[K" for line in log.text.splitlines(keepends=True)).encode()
    elif disguise == "middle":
        noise = "".join(f"INFO tokenized file {n} of many\n" for n in range(3000))
        data = (noise + log.text + "cleaning up\n" * 500).encode()
    elif disguise == "utf-16":
        data = b"\xff\xfe" + log.text.encode("utf-16-le")
    else:
        data = log.text.replace("\n", "\r", 1).encode() if log.text.startswith("  0%") else log.text.encode()
    check(data, log)


@pytest.mark.parametrize("prefix", ["[rank1]: ", "[default0]:[rank0]: ", "[0]:"])
def test_ranks_and_their_prefixes(prefix: str) -> None:
    one = "".join(prefix + line for line in (STEP + OOM_25).splitlines(keepends=True))
    found = diagnose((one + one.replace("GPU 0", "GPU 1")).encode())
    assert [(finding.cause, finding.seen) for finding in found] == [(Cause.FIRST_STEP, 2)]


def test_a_wrapped_message_is_read_whole() -> None:
    wrapped = OOM_FRAGMENTED.replace(". ", ".\n")
    (finding,) = diagnose((FORWARD + wrapped).encode())
    assert finding.cause is Cause.FRAGMENTATION
    assert finding.figures["unallocated"] == int(4.11 * GIB)


def test_the_frame_that_tells_is_quoted_with_its_line() -> None:
    (finding,) = diagnose((STEP + OOM_25).encode())
    quoted = {item.line: item.text for item in finding.evidence}
    assert quoted[7].startswith('File "/v/torch/optim/adamw.py", line 160, in _init_group')
    assert quoted[8].startswith('state["exp_avg_sq"]')
    assert any(text.startswith("torch.OutOfMemoryError") for text in quoted.values())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "all is well\nloss 0.3\n",
        "we never run out of memory with this trick\n",
        "NCCL version 2.27.5+cuda12.9\n",
        "MiB / s\n",
        "Skilled workers\nThe process was Killed off in the story\n",
        "\x00\x01\x02\xff\xfe" * 100,
    ],
)
def test_nothing_is_recognised_in_what_says_nothing(text: str) -> None:
    assert diagnose(text.encode("utf-8", "surrogateescape")) == []


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_a_cut_off_log_never_breaks(log: Log) -> None:
    data = log.text.encode()
    for end in range(0, len(data), 37):
        diagnose(data[:end])
        diagnose(data[end:])


def test_the_line_of_a_find_is_counted_through_a_hundred_megabytes() -> None:
    noise = (
        "{'loss': 1.234, 'learning_rate': 1e-05, 'epoch': 0.1} Killed nccl NCCL MiB / out-of-memory\n" * 1000
    ).encode()
    data = noise * (100 * 2**20 // len(noise)) + (STEP + OOM_25).encode() + noise
    found = diagnose(data)
    assert found[0].kind == "torch-out-of-memory"
    assert found[0].evidence[-1].line == data[: data.index(b"torch.OutOfMemoryError")].count(b"\n") + 1


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        main(["diagnose", *arguments])
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_names_cause_evidence_and_remedies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(STEP + OOM_25, encoding="utf-8")
    code, out, err = run(capsys, str(tmp_path / "train.log"))
    assert (code, err) == (0, "")
    assert "CAUSE: optimizer states, first allocated in the first step\n" in out
    assert "WHERE: account optimizer states, phase step, on the gpu\n" in out
    assert "  1. divide optimizer states over several GPUs" in out


def test_with_a_spec_the_next_rung_has_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(FORWARD + OOM_25, encoding="utf-8")
    (tmp_path / "spec.yaml").write_text(SPEC.replace("method: lora", "method: [lora, qlora]"), encoding="utf-8")
    arguments = (str(tmp_path / "train.log"), "--spec", str(tmp_path / "spec.yaml"))
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "NEXT:  by the ledger of spec.yaml" in out
    document = json.loads(run(capsys, *arguments, "--json")[1])
    cuts = document["findings"][0]["next"]
    assert cuts
    for cut in cuts:
        assert cut["account_saved_bytes"] > 0
        assert cut["peak_bytes"] < cut["peak_before_bytes"]
    assert [cut["rung"] for cut in cuts] == sorted(cut["rung"] for cut in cuts)


def test_a_run_that_was_not_the_plan_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(FORWARD + OOM_25, encoding="utf-8")
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    _, out, _ = run(capsys, str(tmp_path / "train.log"), "--spec", str(tmp_path / "spec.yaml"))
    assert "NOTE:  the card in the log has 79.33 GiB" in out
    assert "NOTE:  the run held 77.24 GiB in tensors" in out


def test_a_spec_that_does_not_fit_at_all_says_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").write_text(STEP + OOM_25, encoding="utf-8")
    (tmp_path / "spec.yaml").write_text(SPEC.replace("method: lora", "method: full"), encoding="utf-8")
    code, out, _ = run(capsys, str(tmp_path / "train.log"), "--spec", str(tmp_path / "spec.yaml"))
    assert code == 0
    assert "does not fit at all" in out
    assert "hardware.gpu" in out


@pytest.mark.parametrize("name", SYMPTOMS)
def test_every_symptom_has_a_prescription(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--symptom", name, "--json")
    (finding,) = json.loads(out)["findings"]
    assert code == 0
    assert len(finding["remedies"]) >= 4
    assert name in run(capsys, "--symptom", "list")[1]


def test_symptoms_are_the_five_of_the_sheet() -> None:
    assert set(SYMPTOMS) == {"start", "growing", "long-sample", "slow", "inference"}
    assert SYMPTOMS["start"].account is Account.PARAMETERS


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), "diagnose-needs-input"),
        (("x.log", "--symptom", "slow"), "diagnose-needs-input"),
        (("--symptom", "longsample"), "symptom-unknown"),
        (("missing.log",), "cannot-read"),
        (("calm.log",), "nothing-recognised"),
        ((".",), "cannot-read"),
    ],
)
def test_what_cannot_be_diagnosed_is_said(
    arguments: tuple[str, ...],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("calm.log").write_text("loss 0.3\n", encoding="utf-8")
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert f"error[{code}]" in err
    assert "help: " in err


def test_an_old_message_alone_still_tells_its_sizes() -> None:
    (finding,) = diagnose(OOM_13.encode())
    assert finding.figures["allocated"] == int(9.55 * GIB)
    assert "GPU 1" in finding.sentence
