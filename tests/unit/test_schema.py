"""The JSON schema of a spec: it accepts what memc accepts, refuses wrong keys and types, and says what each key is."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from memc.cli import main
from memc.facts import gpu_keys, model_keys
from memc.ladder import technique_names
from memc.schema import FILE_MATCH, PUBLISHED_URL, modeline, spec_schema
from memc.spec import Spec, load_spec, parse_spec

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/*/spec.yaml"))
SCHEMA = spec_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
SHORT: dict[str, Any] = {
    "model": "m",
    "data": {"train": "t.jsonl", "max_length": 2048},
    "hardware": {"gpu": "rtx-4090"},
}
WRONG: dict[str, dict[str, Any]] = {
    "unknown key": {"modle": "m"},
    "unknown key in a section": {"data": {"trian": "t", "max_length": 2}},
    "unknown technique": {"ladder": {"forbid": ["zero-4"]}},
    "technique twice": {"ladder": {"forbid": ["zero-1", "zero-1"]}},
    "unknown word": {"task": "sftt"},
    "unknown method": {"method": ["lora", "dora"]},
    "no methods": {"method": []},
    "size without unit": {"memory": {"target": 22}},
    "size with another unit": {"memory": {"target": "22 gigs"}},
    "size of dots": {"memory": {"target": "..GiB"}},
    "time without unit": {"time": {"budget": "24"}},
    "time of words": {"time": {"budget": "a day"}},
    "number as text": {"data": {"train": "t", "max_length": "2048"}},
    "no positive count": {"hardware": {"gpu": "x", "count": 0}},
    "boolean as a word": {"data": {"train": "t", "max_length": 2, "packing": "yes"}},
    "section as text": {"training": "fast"},
    "stage 4": {"pin": {"zero_stage": 4}},
}


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$id"] == PUBLISHED_URL
    assert SCHEMA["$schema"].endswith("2020-12/schema")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_examples_pass(path: Path) -> None:
    loaded = load_spec(path)
    VALIDATOR.validate(loaded.document.root.value)
    VALIDATOR.validate(loaded.spec.resolved())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"memory": {"target": "auto"}, "time": {"budget": "none"}},
        {"memory": {"target": None}, "time": {"budget": None}},
        {"memory": {"target": "22 gib"}, "time": {"budget": "24H"}},
        {"memory": {"reserve": "512MiB"}, "time": {"budget": "$ 12.25"}},
        {"time": {"budget": "90 MIN"}, "pin": {"activation_checkpointing": True, "reduce_bucket_size": 5e8}},
        {"pin": {"target_modules": ["q_proj"], "activation_checkpointing": 3}, "method": "auto"},
        {"ladder": {"forbid": list(technique_names()[:3]), "require": []}, "method": ["full", "lora"]},
    ],
)
def test_what_memc_reads_passes(more: dict[str, Any]) -> None:
    values = {**SHORT, **more}
    parse_spec(json.dumps(values), "spec.json")
    VALIDATOR.validate(values)


@pytest.mark.parametrize("more", WRONG.values(), ids=WRONG)
def test_wrong_specs_fail(more: dict[str, Any]) -> None:
    assert list(VALIDATOR.iter_errors({**SHORT, **more}))


@pytest.mark.parametrize("missing", ["model", "data", "hardware"])
def test_what_is_required_is_missed(missing: str) -> None:
    assert list(VALIDATOR.iter_errors({key: value for key, value in SHORT.items() if key != missing}))


def test_every_field_has_its_sentence_and_its_name() -> None:
    sections = {"": SCHEMA, **{name: SCHEMA["$defs"][info.annotation.__name__] for name, info in _sections()}}
    for section in sections.values():
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            assert field["title"] == name
            assert field["description"].endswith(".")


def _sections() -> list[tuple[str, Any]]:
    return [(name, info) for name, info in Spec.model_fields.items() if hasattr(info.annotation, "model_fields")]


def test_catalogue_names_are_examples_and_not_the_only_ones() -> None:
    assert SCHEMA["properties"]["model"]["examples"] == list(model_keys())
    gpu = SCHEMA["$defs"]["Hardware"]["properties"]["gpu"]
    assert gpu["examples"] == list(gpu_keys())
    assert "enum" not in gpu
    VALIDATOR.validate({**SHORT, "model": "my/own", "hardware": {"gpu": "some-new-card"}})


def test_every_example_in_the_schema_is_valid() -> None:
    for section in (SCHEMA, *SCHEMA["$defs"].values()):
        for name, field in section.get("properties", {}).items():
            part = {"$defs": SCHEMA["$defs"], **field}
            for example in field.get("examples", []):
                assert Draft202012Validator(part).is_valid(example), (name, example)


def test_the_command_prints_schema_modeline_and_catalog_entry(capsys: pytest.CaptureFixture[str]) -> None:
    def out(*arguments: str) -> str:
        with contextlib.suppress(SystemExit):
            main(["schema", *arguments])
        return capsys.readouterr().out

    assert json.loads(out()) == SCHEMA
    assert out("--modeline") == modeline() + "\n"
    assert out("--modeline", "--url", "memc.schema.json") == "# yaml-language-server: $schema=memc.schema.json\n"
    entry = json.loads(out("--schemastore"))
    assert set(entry) == {"name", "description", "fileMatch", "url"}
    assert entry["fileMatch"] == list(FILE_MATCH)
    assert json.loads(out("--url", "https://example.org/s.json"))["$id"] == "https://example.org/s.json"
