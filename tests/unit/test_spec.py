"""The spec: what a short one means, and what every wrong one is told."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from memc.config import Method, Task
from memc.errors import ExitCode, MemcError
from memc.spec import ModuleSet, Spec, load_spec, parse_spec

CASES = yaml.safe_load((Path(__file__).parent / "test_spec_wrong.yaml").read_text(encoding="utf-8"))
SHORT = """\
model: Qwen/Qwen2.5-7B-Instruct
data: {train: data/train.jsonl, max_length: 4096}
hardware: {gpu: rtx-4090}
"""


LEVELS = "abcdefghijkl"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in itertools.pairwise(LEVELS)
)


def parsed(text: str) -> Spec:
    return parse_spec(text, "spec.yaml").spec


def refused(text: str) -> MemcError:
    with pytest.raises(MemcError) as caught:
        parse_spec(text, "spec.yaml")
    assert caught.value.exit_code is ExitCode.USAGE
    return caught.value


def codes(text: str) -> list[str]:
    return [diagnostic.code for diagnostic in refused(text).diagnostics]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_wrong_spec_is_told_exactly_why(case: dict[str, str]) -> None:
    assert str(refused(case["spec"])) == case["error"].rstrip("\n")


def test_short_form_is_enough() -> None:
    spec = parsed(SHORT)
    assert spec.task is Task.SFT
    assert spec.method == ()
    assert spec.methods == (Method.FULL, Method.LORA, Method.QLORA)
    assert spec.training.epochs == 3.0
    assert spec.training.global_batch_size == 16
    assert spec.lora.target_modules is ModuleSet.ALL_LINEAR
    assert spec.memory.target is None
    assert spec.time.budget is None
    assert spec.world_size == 1


def test_units_become_bytes_seconds_and_dollars_and_keep_their_spelling() -> None:
    spec = parsed(SHORT + "memory: {target: 22 GiB}\ntime: {budget: 24h}\n")
    assert spec.memory.target is not None
    assert (spec.memory.target.bytes, spec.memory.target.text) == (22 * 2**30, "22 GiB")
    assert spec.time.budget is not None
    assert (spec.time.budget.seconds, spec.time.budget.usd, spec.time.budget.text) == (86400.0, None, "24h")
    money = parsed(SHORT + "time: {budget: $40}").time.budget
    assert money is not None
    assert (money.seconds, money.usd) == (None, 40.0)


def test_numbers_that_yaml_1_1_misreads() -> None:
    spec = parsed(
        SHORT + "training: {learning_rate: 2e-4}\npin: {reduce_bucket_size: 5e8, sub_group_size: 1_000_000}\n"
    )
    assert spec.training.learning_rate == 2e-4
    assert spec.pin.reduce_bucket_size == 500_000_000
    assert spec.pin.sub_group_size == 1_000_000
    assert parsed(SHORT + "lora: {target_modules: [on, no, 010]}").lora.target_modules == ("on", "no", "010")


@pytest.mark.parametrize(("text", "every"), [("false", 0), ("true", 1), ("0", 0), ("4", 4)])
def test_activation_checkpointing_is_a_flag_or_every_kth_layer(text: str, every: int) -> None:
    pinned = parsed(SHORT + f"pin: {{activation_checkpointing: {text}}}").pin.activation_checkpointing
    assert pinned == every
    assert not isinstance(pinned, bool)


def test_max_steps_replaces_epochs() -> None:
    training = parsed(SHORT + "training: {max_steps: 10}").training
    assert (training.epochs, training.max_steps) == (None, 10)


def test_method_in_order_of_preference() -> None:
    assert parsed(SHORT + "method: qlora").methods == (Method.QLORA,)
    assert parsed(SHORT + "method: [lora, full]").methods == (Method.LORA, Method.FULL)


def test_anchors_and_json_and_crlf_and_byte_order_mark_are_fine() -> None:
    assert parsed(SHORT.replace("4096", "&l 4096") + "pin: {lora_rank: *l}").pin.lora_rank == 4096
    assert parsed(parsed(SHORT).canonical_json()) == parsed(SHORT)
    assert parsed("\ufeff" + SHORT.replace("\n", "\r\n")) == parsed(SHORT)
    assert (
        parsed('{"model": "\\ud83d\\ude00", "data": {"samples": 1, "max_length": 2}, "hardware": {"gpu": "x"}}').model
        == "😀"
    )


def test_new_lines_and_quotes_in_a_path_are_kept() -> None:
    assert (
        parsed(SHORT.replace("data/train.jsonl", '"a\\n$(b) {{ c }}\'.jsonl"')).data.train == "a\n$(b) {{ c }}'.jsonl"
    )


def test_digest_depends_on_what_is_said_not_on_how() -> None:
    digest = parsed(SHORT + "memory: {target: 22GiB}").digest()
    other = "# comment\nhardware:\n    gpu: 'rtx-4090'\n    count: 1\n" + "\n".join(SHORT.splitlines()[:2])
    assert parsed(other + "\nmemory: {target: 22528 MiB}").digest() == digest
    assert parsed(SHORT + "memory: {target: 21GiB}").digest() != digest
    assert len(digest) == 64


def test_resolved_prints_every_default_in_words() -> None:
    resolved = parsed(SHORT).resolved()
    assert (resolved["method"], resolved["memory"]["target"], resolved["time"]["budget"]) == ("auto", "auto", "none")
    assert resolved["training"]["epochs"] == 3.0
    assert set(resolved) == set(Spec.model_fields)


def test_fields_are_located_in_the_text() -> None:
    loaded = parse_spec(SHORT, "dir/spec.yaml")
    assert loaded.name == "spec.yaml"
    assert str(loaded.locate("hardware.gpu")) == "dir/spec.yaml:3:17 · hardware.gpu"
    assert str(loaded.locate("hardware.count")) == "dir/spec.yaml:3:1 · hardware.count"
    assert str(loaded.locate("memory.target")) == "dir/spec.yaml:1:1 · memory.target"
    shown = loaded.diagnostic("hardware.gpu", "x", "message")
    assert shown.context == ("hardware: {gpu: rtx-4090}", "                ^")


def test_every_field_has_its_sentence_in_the_schema() -> None:
    schema = Spec.model_json_schema()
    sections = [schema, *(part for part in schema["$defs"].values() if "properties" in part)]
    assert len(sections) == 12
    for section in sections:
        assert section["description"]
        for name, value in section["properties"].items():
            assert value.get("description") or "$ref" in value, name


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "spec-not-found"),
        (b"", "spec-empty"),
        (b"# only a comment\n", "spec-empty"),
        (b"\xff\xfem\x00", "spec-not-utf8"),
        (b"model: caf\xe9", "spec-not-utf8"),
        (b"model: a\x00b", "spec-yaml-character"),
        (b"a: b\n" * 100_000, "spec-too-large"),
    ],
)
def test_files_that_cannot_be_a_spec(tmp_path: Path, content: bytes | None, code: str) -> None:
    path = tmp_path / "spec.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MemcError) as caught:
        load_spec(path)
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == [code]
    assert str(path) in str(caught.value)


def test_a_folder_and_an_impossible_path_are_refused(tmp_path: Path) -> None:
    for path, code in ((tmp_path, "spec-is-a-folder"), (Path("a\0b"), "spec-unreadable")):
        with pytest.raises(MemcError) as caught:
            load_spec(path)
        assert caught.value.diagnostics[0].code == code


def test_load_reads_what_parse_reads(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SHORT, encoding="utf-8-sig")
    assert load_spec(path).spec == parsed(SHORT)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "".join(f"key{i}: 1\n" for i in range(3000)),
        "[" * 100_000,
        "{a: " * 50_000,
        "? " * 100_000,
    ],
)
def test_bombs_are_refused_early(text: str) -> None:
    assert codes(text) in (["spec-too-many-values"], ["spec-too-deep"])


def test_many_problems_are_cut_off() -> None:
    text = SHORT + "".join(f"unknown{i}: 1\n" for i in range(200))
    found = refused(text).diagnostics
    assert len(found) == 51
    assert found[-1].message == "150 more problems are not shown"


def test_a_wrong_field_does_not_hide_contradictions_elsewhere() -> None:
    text = (
        SHORT.replace("4096", "-1") + "pin: {zero_stage: 2, offload_param: cpu}\nladder: {require: [a], forbid: [a]}\n"
    )
    assert codes(text) == ["spec-out-of-range", "spec-offload-param-needs-zero-3", "spec-required-and-forbidden"]


def test_pretraining_documents_may_be_longer_than_a_packed_sequence() -> None:
    text = "task: pretrain\n" + SHORT.replace("4096", "4096, mean_tokens: 5000, packing: true")
    assert parsed(text).data.mean_tokens == 5000
    assert codes(text.replace("pretrain", "sft")) == ["spec-mean-above-max-length"]


def test_reading_a_spec_imports_no_framework() -> None:
    program = (
        "import sys, memc.spec; print([m for m in ('torch', 'transformers', 'rich', 'jinja2') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
