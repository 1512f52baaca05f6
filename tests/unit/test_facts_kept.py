"""What is kept of fact files: read in place of the YAML while the file is the same, and never where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from memc.errors import MemcError
from memc.facts import documents
from memc.resources import kept_path

TEXT = "name: a\nsource: a page\nchecked: '2026-01-01'\nvalues: {whole: 1, share: 0.5, none: null, flag: true}\n"
WITHOUT_JSON = "name: a\nsource: a page\nchecked: 2026-01-01\nby_number: {1: one}\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a fact file of a catalogue of its own, where byte code may be written."""
    monkeypatch.setattr(documents, "specs_root", lambda: tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    path = tmp_path / "things" / "a.yaml"
    path.parent.mkdir()
    path.write_text(TEXT, encoding="utf-8")
    return path


def _kept(file: Path) -> Path:
    path = kept_path(file, documents._MADE_BY)
    assert path is not None
    return path


def test_what_is_kept_reads_like_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = documents.read_spec("things", "a")
    assert _kept(file).is_file()
    monkeypatch.setattr(documents, "parse_spec", lambda *_args, **_kwargs: pytest.fail("the YAML was parsed again"))
    again = documents.read_spec("things", "a")
    assert again == first
    assert [type(value) for value in again["values"].values()] == [int, float, type(None), bool]


def test_a_changed_file_is_read_anew(file: Path) -> None:
    documents.read_spec("things", "a")
    file.write_text(TEXT.replace("0.5", "0.25"), encoding="utf-8")
    assert documents.read_spec("things", "a")["values"]["share"] == 0.25


@pytest.mark.parametrize("content", [b"", b"no digest at all, but long enough to be one", None])
def test_damage_is_read_past(file: Path, content: bytes | None) -> None:
    first = documents.read_spec("things", "a")
    kept = _kept(file)
    kept.write_bytes(kept.read_bytes()[:40] if content is None else content)
    assert documents.read_spec("things", "a") == first


def test_what_json_cannot_say_is_not_kept(file: Path) -> None:
    file.write_text(WITHOUT_JSON, encoding="utf-8")
    assert documents.read_spec("things", "a")["by_number"] == {1: "one"}
    assert not _kept(file).exists()


def test_nothing_is_written_where_python_writes_no_byte_code(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    documents.read_spec("things", "a")
    assert not _kept(file).parent.exists()


def test_a_folder_that_cannot_be_written_is_left_alone(file: Path) -> None:
    (file.parent / "__pycache__").write_text("in the way", encoding="utf-8")
    assert documents.read_spec("things", "a")["name"] == "a"


def test_a_file_without_a_source_is_refused_each_time(file: Path) -> None:
    file.write_text(TEXT.replace("source: a page", "source: ''"), encoding="utf-8")
    for _ in range(2):
        with pytest.raises(MemcError, match="has no source"):
            documents.read_spec("things", "a")
