"""Every report of tests/cases/reports, check by check: it passes, waits with a reason, or disagrees with one.

The form, its reading and the checks are those of benchmarks/reported, which also reads files that are kept elsewhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CASES = sorted((ROOT / "tests" / "cases" / "reports").glob("*.yaml"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from reported.answers import answered, ask  # noqa: E402
from reported.checks import Finding, evaluate, verdict  # noqa: E402
from reported.reading import Reading, card, read  # noqa: E402
from reported.runs import RESULTS_VARIABLE, TESTS, shown_by  # noqa: E402

REPORTS = [report for path in CASES for report in yaml.safe_load(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("report", REPORTS, ids=[report["id"] for report in REPORTS])
def test_report(report: Mapping[str, Any], tmp_path: Path) -> None:
    answers = answered(report, tmp_path)
    waiting = []
    for check in report["expected"]["checks"]:
        outcome = evaluate(check, answers)
        assert outcome.detail
        if outcome.finding is Finding.WAITS:
            waiting.append(f"{check['type']}: {outcome.detail}")
        elif check.get("disagree"):
            assert outcome.finding is Finding.FAILED, "memc agrees by now: take `disagree` out of the case"
        else:
            assert outcome.finding is Finding.PASSED, f"{check['type']}: {outcome.detail}"
    if len(waiting) == len(report["expected"]["checks"]):
        pytest.skip("the report waits for files that memc did not write, for a family, or for a run to be read")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("A100-80GB", "a100-sxm4-80gb"),
        ("H100NVL-94GB", "h100-nvl-94gb"),
        ("RTX3090-24GB", "rtx-3090"),
        ("RTX A6000", "rtx-a6000"),
        ("V100-16GB", "v100-sxm2-16gb"),
        ("T4-16GB", "t4"),
        ("MI300X-192GB", "mi300x"),
    ],
)
def test_a_card_is_read_by_its_words_and_gigabytes(name: str, key: str) -> None:
    found = card(name)
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize(
    "sketch",
    [
        {},
        {"model": {"arch": "llama", "params_b": 6.7}},
        {"model": {"arch": "unheard-of", "params_b": 3}, "hardware": {"gpu": "A100-80GB"}},
        {"model": {"arch": "llama", "params_b": 6.738}, "hardware": {"gpu": "no such card"}, "training": None},
        {
            "model": {"arch": "llama", "params_b": 6.738},
            "hardware": {"gpu": "T4-16GB"},
            "training": {"optimizer": "lion"},
        },
    ],
)
def test_an_incomplete_sketch_is_read_without_failing(sketch: dict[str, Any], tmp_path: Path) -> None:
    reading = read({"id": "x", "spec": sketch}, tmp_path)
    assert reading.asked is not None or reading.waits


def _read_with(training: dict[str, Any], folder: Path, model: Mapping[str, Any] | None = None) -> Reading:
    sketch = {"model": model or {"arch": "qwen2", "params_b": 7.616}, "hardware": {"gpu": "A100-80GB"}}
    return read({"id": "x", "spec": {**sketch, "training": training}}, folder)


def test_pairs_are_read_as_the_task_that_trains_on_them(tmp_path: Path) -> None:
    reading = _read_with({"objective": "dpo", "method": "lora", "micro_batch": 4}, tmp_path)
    assert reading.asked is not None
    assert (reading.asked["task"], reading.asked["pin"]["micro_batch_size"]) == ("dpo", 4)
    assert not reading.waits
    assert ask(reading.asked, tmp_path / "asked").answer is not None
    assert any("orpo" in reason for reason in _read_with({"objective": "orpo"}, tmp_path).waits)


@pytest.mark.parametrize(
    ("stated", "whole", "waits"),
    [
        (["wte", "lm_head"], ["embed_tokens", "lm_head"], False),
        ("model.embed_tokens, lm_head", ["embed_tokens", "lm_head"], False),
        (["score"], None, True),
    ],
)
def test_modules_that_train_whole_get_the_names_of_the_model(
    stated: list[str] | str, whole: list[str] | None, waits: bool, tmp_path: Path
) -> None:
    reading = _read_with({"method": "lora", "modules_to_save": stated}, tmp_path)
    assert reading.asked is not None
    assert reading.asked.get("lora", {}).get("modules_to_save") == whole
    assert bool(reading.waits) is waits


def test_how_new_tokens_train_is_left_open_where_a_sketch_says_both(tmp_path: Path) -> None:
    training = {"method": "lora", "lora_r": 8, "modules_to_save": ["embed_tokens"], "new_tokens": 2}
    reading = _read_with(training, tmp_path)
    assert reading.asked is not None
    assert reading.open is not None
    assert reading.asked["lora"] == {"rank": 8, "modules_to_save": ["embed_tokens"]}
    assert reading.open["lora"] == {"rank": 8, "new_tokens": ["<new-0>", "<new-1>"]}
    alone = _read_with({"method": "lora", "new_tokens": ["<call>"]}, tmp_path).asked
    assert alone is not None
    assert alone["lora"] == {"new_tokens": ["<call>"]}
    assert _read_with({"method": "full", "new_tokens": 1}, tmp_path).waits


def test_modules_that_train_whole_are_counted_once_with_gradients_and_moments(tmp_path: Path) -> None:
    """Two tables of 152,064 x 3584: 4 B of copy, 4 B of gradient and 8 B of moments each."""
    training = {"method": "lora", "modules_to_save": ["embed_tokens", "lm_head"], "micro_batch": 1}
    sketch = {"model": {"arch": "qwen2", "params_b": 7.616}, "hardware": {"gpu": "A100-80GB"}, "training": training}
    size = 2 * 152_064 * 3584 * 16 / 2**30
    check = {"type": "ledger_range", "item": "modules_to_save_states", "gib": [size - 0.001, size + 0.001]}
    outcome = evaluate(check, answered({"id": "x", "spec": sketch}, tmp_path))
    assert outcome.finding is Finding.PASSED, outcome.detail


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        ("save phase reported separately", Finding.PASSED),
        ("load phase is listed", Finding.PASSED),
        ("tokenise phase reported", Finding.WAITS),
    ],
)
def test_a_phase_that_is_reported_has_a_row_of_its_own(words: str, finding: Finding, tmp_path: Path) -> None:
    sketch = {"model": {"arch": "qwen2", "params_b": 7.616}, "hardware": {"gpu": "A100-80GB"}, "training": {}}
    outcome = verdict(words, answered({"id": "x", "spec": sketch}, tmp_path))
    assert outcome.finding is finding, outcome.detail


def test_a_number_is_looked_for_on_hardware_that_the_run_as_asked_would_fit_on(tmp_path: Path) -> None:
    report = next(report for report in REPORTS if report["id"] == "f03")
    answers = answered(report, tmp_path)
    check = {"type": "emit_at_least", "key": "zero_optimization.offload_param.buffer_size"}
    assert evaluate({**check, "value": 250_880 * 2048}, answers).finding is Finding.PASSED
    assert evaluate({**check, "value": 250_880 * 2048 * 2}, answers).finding is Finding.FAILED


def test_files_are_those_of_a_model_of_text_where_memc_writes_none_for_the_model(tmp_path: Path) -> None:
    sketch = {
        "model": {"arch": "blenderbot", "params_b": 2.7},
        "hardware": {"gpu": "A100-80GB", "gpus_per_node": 8, "host_ram_gib": 1000},
        "training": {"method": "full", "engine": "zero3", "micro_batch": 1, "seq_len": 128},
    }
    answers = answered({"id": "x", "spec": sketch}, tmp_path)
    key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    outcome = evaluate({"type": "emit_has", "file": "ds_config.json", "key": key, "value": True}, answers)
    assert outcome.finding is Finding.PASSED, outcome.detail
    assert "of facebook" not in outcome.detail
    image = evaluate({"type": "emit_has", "file": "train script", "key": "max_pixels"}, answers)
    assert image.finding is Finding.WAITS


def test_what_only_the_load_stops_fits_in_steady_state(tmp_path: Path) -> None:
    report = next(report for report in REPORTS if report["id"] == "a03")
    answers = answered(report, tmp_path)
    assert verdict("fits in steady state but tight; load phase is the binding one", answers).finding is Finding.PASSED
    smaller = {**report, "spec": {**report["spec"], "hardware": {**report["spec"]["hardware"], "gpu": "T4-16GB"}}}
    outcome = verdict("fits in steady state", answered(smaller, tmp_path / "smaller"))
    assert outcome.finding is Finding.FAILED, outcome.detail


@pytest.mark.parametrize(
    ("words", "test"),
    [
        ("after one optimizer step every lora_B has non-zero update", "test_every_lora_b_moves_in_one_step"),
        ("gradients of all adapters are not None", "test_every_adapter_has_a_gradient_after_one_backward"),
        ("size of the saved checkpoint is what the parameters take", "test_partitioned_weights_are_saved_whole"),
        ("first loss below ln(vocab)", "test_experts_load_whole_into_shards"),
    ],
)
def test_a_run_is_shown_by_an_end_to_end_test_that_exists(
    words: str, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = shown_by(words)
    assert shown is not None
    assert test in shown.tests
    functions = re.findall(r"^def (test_\w+)", (ROOT / TESTS).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(shown.tests) <= set(functions)
    results = tmp_path / "results.xml"
    monkeypatch.setenv(RESULTS_VARIABLE, str(results))
    assert shown_by(words).passed is None  # type: ignore[union-attr]
    for outcome, passed in (("", True), ("<failure/>", False), ("<skipped/>", None)):
        cases = [
            f'<testcase classname="tests.e2e.test_reported" name="{name}[a]">{outcome}</testcase>'
            for name in shown.tests
        ]
        results.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>", encoding="utf-8")
        assert shown_by(words).passed is passed  # type: ignore[union-attr]


def test_nothing_is_known_to_show_what_nobody_looks_at() -> None:
    assert shown_by("the room stays below 30 degrees") is None
