"""memc calibrate: from what runs measured to figures that plans use, and back; and all that does not count."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from inprocess import Ended, command_runner
from memc.calibration.configs import config_of, settings_of
from memc.clock import Clock, clock_facts
from memc.config import Precision
from memc.document import lock_digest
from memc.facts import load_gpu, load_model
from memc.facts.measured import SWITCH, read_measured
from memc.ledger import Estimator, ledger_facts
from memc.units import GIB, MIB
from memc.verify.lock import read_lock
from memc.verify.measurements import append_measurement
from planmaker import make_config

SPEC = """\
model: Qwen/Qwen2.5-1.5B-Instruct
data: {train: data/train.jsonl, max_length: 2048, samples: 2000, packing: true}
method: lora
training: {epochs: 1, global_batch_size: 16}
hardware: {gpu: rtx-4090, count: 1}
"""
CONTEXT = 471 * MIB
RATIO = 1.07
SLOWER = 0.7

Run = Callable[..., Ended]


@pytest.fixture
def memc(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs commands in a folder of its own, with a file for figures that is not there yet and one compiled spec."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SWITCH, str(tmp_path / "measured.yaml"))
    run = command_runner(capsys)
    Path("spec.yaml").write_text(SPEC)
    assert run("compile", "spec.yaml").code == 0
    return run


def lock() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path("out/memc.lock").read_text())
    return document


def slower_step_seconds() -> float:
    """Returns the clock's time of the folder's plan on a card whose products run at a part of their rate."""
    settings, gpu = lock()["plan"]["settings"], load_gpu("rtx-4090")
    facts = clock_facts(gpu, Precision.BF16, 1)
    model, config = load_model("Qwen/Qwen2.5-1.5B-Instruct", base_dir=Path()), config_of(settings)
    slower = replace(facts, flops_per_second=SLOWER * facts.flops_per_second)
    return Clock(model, slower).step_time(config, Estimator(model, ledger_facts(gpu)).counts(config)).step_seconds


def measured(**changes: Any) -> dict[str, Any]:
    """Returns a measurement as memc verify leaves it, on a card with another context, allocator and rate."""
    allocated = lock()["ledger"]["gpu"]["peak_allocated_bytes"]
    reserved = round(RATIO * allocated)
    rank = {
        "rank": 0,
        "device_name": "NVIDIA GeForce RTX 4090",
        "phases": {},
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "required_bytes": reserved + CONTEXT,
        "host_rss_peak_bytes": GIB,
    }
    return {
        "grade": "measured",
        "judged": True,
        "fits": True,
        "device": "cuda",
        "driver": "580.1",
        "versions": {"torch": lock()["facts"]["stack.torch"]},
        "steps": 4,
        "world_size": 1,
        "random_weights": True,
        "step_seconds": slower_step_seconds(),
        "ranks": [{**rank, **changes.pop("rank", {})}],
        **changes,
    }


def keep(measurement: dict[str, Any]) -> None:
    append_measurement(read_lock(Path("out")), measurement)


def figures() -> dict[str, Any]:
    return {name: figure.median for name, figure in read_measured(Path("measured.yaml")).cards["rtx-4090"].items()}


def test_what_a_run_measured_is_what_the_next_plan_rests_on(memc: Run) -> None:
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    keep(measured())
    done = memc("calibrate", "out")
    assert done.code == 0, done.err
    assert "rtx-4090: 1 measurements, 1 of them new" in done.out
    catalogue = clock_facts(load_gpu("rtx-4090"), Precision.BF16, 1).flops_per_second
    assert figures() == {
        "context_bytes": CONTEXT,
        "reserved_over_allocated": pytest.approx(RATIO, rel=1e-5),
        "training_flops_per_second.bf16": pytest.approx(SLOWER * catalogue, rel=1e-4),
    }
    done = memc("compile", "spec.yaml")
    assert done.code == 0, done.err
    assert "3 figures measured on rtx-4090 were used (user facts)" in done.err
    now = lock()
    assert now["clock"]["step_seconds"] == pytest.approx(slower_step_seconds(), rel=1e-4)
    entries = {entry["name"]: entry for entry in now["ledger"]["gpu"]["entries"]}
    assert entries["cuda-context"]["bytes"] == CONTEXT
    assert "1 measured on this card" in entries["cuda-context"]["source"]
    gpu = now["ledger"]["gpu"]
    assert gpu["peak_reserved_bytes"] == pytest.approx(RATIO * gpu["peak_allocated_bytes"], rel=1e-5)
    assert entries["allocator-measured-reserve"]["grade"] == "measured"
    assert now["calibration"]["origin"] == "user facts"
    assert now["calibration"]["figures"]["context_bytes"] == {
        "count": 1, "median": CONTEXT, "minimum": CONTEXT, "maximum": CONTEXT,
    }  # fmt: skip
    plan = Path("out/PLAN.md").read_text()
    assert "What was measured on your own machine" in plan
    assert "471.0 MiB (median of 1 measurement)" in plan
    assert "measured: context: 471.0 MiB" in memc("explain", "spec.yaml").out
    assert json.loads(memc("explain", "spec.yaml", "--json").out)["calibration"] == now["calibration"]

    done = memc("compile", "spec.yaml", "--no-calibration")
    assert "which are not here or switched off: the catalogue's are used" in done.err
    after = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    assert {name: text for name, text in after.items() if name != "memc.lock"} == {
        name: text for name, text in before.items() if name != "memc.lock"
    }
    assert {key: value for key, value in json.loads(after["memc.lock"]).items() if key != "measurements"} == {
        key: value for key, value in json.loads(before["memc.lock"]).items() if key != "measurements"
    }


def test_a_plan_without_room_for_the_allocator_of_earlier_runs_climbs(memc: Run) -> None:
    required = lock()["ledger"]["gpu"]["required_bytes"]
    tight = SPEC + f"memory: {{target: {(required + 100 * MIB) // MIB}MiB}}\n"
    Path("tight.yaml").write_text(tight)
    assert memc("explain", "tight.yaml").code == 0
    first = json.loads(memc("explain", "tight.yaml", "--json").out)
    ratio = (first["budget"]["gpu_bytes"] - CONTEXT) / first["ledger"]["gpu"]["peak_allocated_bytes"] + 0.01
    reserved = round(ratio * lock()["ledger"]["gpu"]["peak_allocated_bytes"])
    keep(measured(rank={"peak_reserved_bytes": reserved, "required_bytes": reserved + CONTEXT}))
    assert memc("calibrate", "out").code == 0
    then = json.loads(memc("explain", "tight.yaml", "--json").out)
    assert then["plan"]["settings"] != first["plan"]["settings"]
    assert then["plan"]["rung"] >= first["plan"]["rung"]
    assert then["ledger"]["gpu"]["required_bytes"] <= then["budget"]["gpu_bytes"] == first["budget"]["gpu_bytes"]
    assert any("median of 1 runs measured on rtx-4090" in warning for warning in then["plan"]["warnings"])


def test_measurements_are_merged_each_once_and_their_spread_is_kept(memc: Run) -> None:
    for more in (0, 2, 10):
        allocated = round(lock()["ledger"]["gpu"]["peak_allocated_bytes"] * RATIO)
        keep(measured(rank={"required_bytes": allocated + CONTEXT + more * MIB}))
    assert memc("calibrate", "out").code == 0
    assert memc("calibrate", "out/memc.lock", "out").out.startswith("rtx-4090: 3 measurements, 0 of them new")
    context = read_measured(Path("measured.yaml")).cards["rtx-4090"]["context_bytes"]
    assert (context.minimum, context.median, context.maximum, context.count) == (
        CONTEXT, CONTEXT + 2 * MIB, CONTEXT + 10 * MIB, 3,
    )  # fmt: skip
    before = Path("measured.yaml").read_bytes()
    done = memc("calibrate", "out", "--dry-run", "--json")
    assert Path("measured.yaml").read_bytes() == before
    assert json.loads(done.out)["written"] is False


def test_check_plans_with_the_figures_of_the_lock_and_says_what_this_machine_lacks(
    memc: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def codes() -> dict[str, str]:
        done = memc("check", "out", "--json")
        folder = json.loads(done.out)["folders"][0]
        return {item["code"]: item["level"] for item in folder["findings"]} | {"": str(done.code)}

    keep(measured())
    assert memc("calibrate", "out").code == 0
    assert codes() == {"": "0", "calibration-unused": "note"}
    assert memc("compile", "spec.yaml").code == 0
    assert codes() == {"": "0"}
    keep(measured(driver="581"))
    assert memc("calibrate", "out").code == 0
    assert codes() == {"": "0", "calibration-changed": "warning"}
    monkeypatch.setenv(SWITCH, str(tmp_path / "elsewhere.yaml"))
    assert codes() == {"": "0", "calibration-missing": "warning"}
    monkeypatch.setenv(SWITCH, "off")
    assert codes() == {"": "0"}
    broken = lock()
    broken["calibration"]["figures"]["context_bytes"]["median"] = "much"
    Path("out/memc.lock").write_text(json.dumps(broken))
    assert codes()["calibration-malformed"] == "warning"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grade": "rehearsed"}, "no card was measured (rehearsed)"),
        ({"device": "cpu"}, "no card was measured (on cpu)"),
        ({"rank": {"device_name": "Voodoo 2"}}, "no gpu is called 'Voodoo 2'"),
        ({"versions": {"torch": "1.13.1"}}, "it was measured with torch 1.13.1, and"),
        ({"rank": {"peak_reserved_bytes": 1}}, "it cannot be read: 1 bytes are reserved of which"),
    ],
)
def test_what_tells_nothing_of_a_card_is_named_with_its_reason(memc: Run, changes: dict[str, Any], said: str) -> None:
    keep(measured(**changes))
    done = memc("calibrate", "out")
    assert done.code == 2
    assert "error[calibrate-nothing]" in done.err
    assert said in done.err
    assert not Path("measured.yaml").exists()


def test_what_others_held_on_the_card_is_no_part_of_a_context(memc: Run) -> None:
    reserved = round(RATIO * lock()["ledger"]["gpu"]["peak_allocated_bytes"])
    keep(measured(rank={"required_bytes": reserved + CONTEXT + GIB, "others_bytes": GIB}))
    assert memc("calibrate", "out").code == 0
    assert figures()["context_bytes"] == CONTEXT


def test_other_cards_and_other_versions_count_when_asked_for(memc: Run) -> None:
    keep(measured(versions={"torch": "1.13.1"}))
    assert memc("calibrate", "out", "--any-version").code == 0
    done = memc("calibrate", "out", "--any-version", "--gpu", "t4", "-o", "t4.yaml")
    assert "it was measured on rtx-4090, and --gpu asks for t4" in done.err


def test_steps_that_no_rate_explains_give_no_rate_and_the_rest_counts(memc: Run) -> None:
    keep(measured(step_seconds=900.0))
    assert memc("calibrate", "out").code == 0
    assert "training_flops_per_second.bf16" not in figures()
    told = yaml.safe_load(Path("measured.yaml").read_text())["cards"]["rtx-4090"]["measurements"][0]["conditions"]
    assert "something else held it up" in told["no_rate"]


def test_a_value_far_from_all_others_is_left_out_and_said(memc: Run) -> None:
    reserved = round(RATIO * lock()["ledger"]["gpu"]["peak_allocated_bytes"])
    for context in (CONTEXT, CONTEXT + MIB, CONTEXT + 2 * MIB, 5 * GIB, 40 * GIB):
        keep(measured(rank={"required_bytes": reserved + context}))
    done = memc("calibrate", "out")
    assert done.code == 0
    assert read_measured(Path("measured.yaml")).cards["rtx-4090"]["context_bytes"].count == 3
    assert "an outlier (--keep-outliers takes it)" in done.out
    assert "is above the 2.5" in done.out, "a context larger than the card"
    assert memc("calibrate", "out", "--keep-outliers", "-o", "all.yaml").code == 0
    assert read_measured(Path("all.yaml")).cards["rtx-4090"]["context_bytes"].count == 4


def test_everything_that_cannot_be_read_is_named_and_nothing_is_written(memc: Run) -> None:
    keep(measured())
    for name, text in {"a/memc.lock": "{", "b/memc.lock": '{"schema": "memc/lock/0"}', "c.yaml": "- 1"}.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("empty").mkdir()
    done = memc("calibrate", "out", "a", "b", "c.yaml", "empty", "gone")
    assert done.code == 2
    found = [line for line in done.err.splitlines() if line.startswith("error[")]
    assert [line.partition("]")[0].removeprefix("error[") for line in found] == [
        "calibrate-path",
        "calibrate-path",
        "calibrate-lock-unreadable",
        "calibrate-lock-unreadable",
        "calibrate-file-unreadable",
    ]
    assert not Path("measured.yaml").exists()


def test_a_lock_that_was_edited_is_not_believed(memc: Run) -> None:
    keep(measured())
    document = lock()
    document["plan"]["settings"]["max_length"] = 64
    Path("out/memc.lock").write_text(json.dumps(document))
    assert document["digest"] != lock_digest(document)
    assert "the lock was edited by hand" in memc("calibrate", "out").err


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("schema: memc/measured/1", "fact-unsourced"),
        ("{schema: other, source: me, checked: '2026-01-01'}", "measured-file-malformed"),
        ("cards: [", "fact-file-malformed"),
        (
            "{schema: memc/measured/1, source: me, checked: '2026-01-01', cards: {rtx-4090: {figures: {contxt_bytes: "
            "{median: 1, minimum: 1, maximum: 1, count: 1}}}}}",
            "measured-file-malformed",
        ),
        (
            "{schema: memc/measured/1, source: me, checked: '2026-01-01', cards: {rtx-4090: {figures: {context_bytes: "
            "{median: .nan, minimum: 1, maximum: 1, count: 1}}}}}",
            "measured-file-malformed",
        ),
    ],
)
def test_a_broken_file_of_figures_stops_a_compile_that_would_use_it(memc: Run, text: str, code: str) -> None:
    Path("measured.yaml").write_text(text)
    done = memc("compile", "spec.yaml")
    assert done.code == 2
    assert f"error[{code}]" in done.err
    assert memc("compile", "spec.yaml", "--no-calibration").code == 0


def test_settings_without_defaults_lead_back_to_their_configuration() -> None:
    config = make_config()
    assert config_of(settings_of(config)) == config
    assert "context_parallel" not in settings_of(config)
    with pytest.raises(TypeError):
        config_of({**settings_of(config), "micro_batch_size": "two"})
