"""What the documentation is generated from is complete: every code, command, field, technique, card and model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from memc.errors import ExitCode
from memc.facts import gpu_keys, model_keys
from memc.ladder import LADDER

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from pages.catalogue import gpu_table, model_table  # noqa: E402
from pages.codes import UnresolvedCodeError, code_entries, codes_section, source_codes  # noqa: E402
from pages.commands import command_entries, command_names, commands_section  # noqa: E402
from pages.fields import fields_section, spec_fields  # noqa: E402
from pages.techniques import ladder_section, technique_settings  # noqa: E402
from pages.text import cell, fenced, table  # noqa: E402


def test_every_code_of_the_source_has_an_entry_and_no_entry_is_left_over() -> None:
    source, entries = source_codes(), code_entries()
    missing = {code: files for code, files in source.items() if code not in entries}
    assert missing == {}, f"describe in docs/errors.yaml: {missing}"
    assert [code for code in entries if code not in source] == [], "no longer in the source"


def test_every_entry_says_what_a_code_means_and_what_to_do() -> None:
    section = codes_section()
    for code, entry in code_entries().items():
        assert set(entry) == {"area", "meaning", "fix"}, code
        assert entry["meaning"].endswith("."), code
        assert entry["fix"].endswith("."), code
        assert f"### `{code}` {{ #{code} }}" in section


def test_codes_that_tests_have_seen_printed_are_found_in_the_source() -> None:
    """The reader of the source is held to what commands really print, as other tests and the examples recorded it."""
    files = [path for kind in ("*.py", "*.yaml", "*.txt") for path in (ROOT / "tests").rglob(kind)]
    texts = [path.read_text(encoding="utf-8") for path in files if path != Path(__file__)]
    printed = set(re.findall(r"error\[([a-z0-9-]+)\]", "\n".join(texts)))
    assert len(printed) > 20
    assert printed <= set(source_codes())


SOURCE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Diagnostic:
    code: str
    message: str

def usage_error(code: str, message: str) -> Diagnostic:
    return Diagnostic(code, message)

def unknown(kind: str) -> Diagnostic:
    return usage_error(f"{kind}-unknown", "m")

def find(flag: bool) -> list[Diagnostic]:
    pairs = [("in-a-tuple", "m")]
    code = "when-true" if flag else "when-false"
    fail(3)
    first = [Diagnostic(code=code, message=m) for code, m in pairs]
    return [*first, unknown("gpu"), unknown("model"), usage_error(code, "m")]

def fail(code: int) -> None: ...
"""


def test_codes_are_followed_through_parameters_tuples_and_choices(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE, encoding="utf-8")
    found = source_codes(tmp_path)
    assert set(found) == {"gpu-unknown", "model-unknown", "in-a-tuple", "when-true", "when-false"}
    assert found["in-a-tuple"] == ("module.py",)


def test_a_code_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    text = SOURCE + "\ndef other(make) -> Diagnostic:\n    return usage_error(make(), 'm')\n"
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    with pytest.raises(UnresolvedCodeError, match=r"module\.py:\d+: .*make\(\)"):
        source_codes(tmp_path)


def test_every_command_is_described_with_examples_and_exit_codes() -> None:
    entries, section = command_entries(), commands_section()
    assert set(command_names()) <= set(entries)
    for name in command_names():
        assert f"## memc {name} {{ #{name} }}" in section
        assert entries[name]["examples"], name
        assert set(entries[name]["exits"]) <= set(ExitCode), name
        assert ExitCode.OK in entries[name]["exits"], name


def test_every_field_is_listed_with_its_sentence() -> None:
    section = fields_section()
    assert len(spec_fields()) > 60
    for field in spec_fields():
        (row,) = (line for line in section.splitlines() if line.startswith(f"| `{field}` |"))
        _, _, kind, default, sentence, _ = (part.strip() for part in re.split(r"(?<!\\)\|", row))
        assert kind
        assert kind != "value"
        assert default
        assert sentence.endswith("."), field
    assert "| `data.max_length` | whole number, ≥ 1 and ≤ 16,777,216 | required |" in section
    assert "| `memory.target` | `auto` or size with unit, for example `22GiB` | `auto` |" in section
    assert "| `training.epochs` | number, > 0 and ≤ 100,000 | `3.0` |" in section


def test_every_technique_is_described_and_changes_a_setting() -> None:
    section = ladder_section()
    for technique in LADDER:
        assert f"`{technique.name}`" in section
        assert technique.boundary in section
        assert bool(technique_settings(technique)) is (technique.name != "fp8"), "which stands for its reason alone"
    chosen = next(technique for technique in LADDER if technique.name == "zero-2")
    assert technique_settings(chosen) == {"engine": "deepspeed", "zero_stage": "2"}


def test_the_catalogue_is_complete() -> None:
    gpus, models = gpu_table(), model_table()
    assert [key for key in gpu_keys() if f"| `{key}` |" not in gpus] == []
    assert [key for key in model_keys() if f"| `{key}` |" not in models] == []


def test_text_of_any_kind_stays_in_its_cell_and_block() -> None:
    assert table(["a", "b"], [["x|y\nz", None]], ["b"]) == "| a | b |\n| --- | ---: |\n| x\\|y z | - |\n"
    assert cell(True) == "yes"
    assert fenced("```\nx\n```").startswith("````text\n```")
