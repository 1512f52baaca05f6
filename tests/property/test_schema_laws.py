"""Law of the schema: whatever memc reads, the schema accepts; an editor never underlines a valid spec."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from memc.ladder import technique_names
from memc.schema import spec_schema
from memc.spec import parse_spec
from test_spec_laws import JUNK, KEYS, VALID, read

VALIDATOR = Draft202012Validator(spec_schema())


@given(VALID)
@settings(max_examples=120, deadline=None)
def test_every_valid_spec_passes(values: dict[str, Any]) -> None:
    values = {**values, "ladder": {"forbid": [technique_names()[0]]}}
    loaded = parse_spec(yaml.safe_dump(values, allow_unicode=True), "spec.yaml")
    VALIDATOR.validate(loaded.document.root.value)
    VALIDATOR.validate(loaded.spec.resolved())


@given(VALID, st.sampled_from(KEYS), st.sampled_from(["training", "data", "pin", "memory", "time", ""]), JUNK)
@settings(max_examples=300, deadline=None)
def test_a_spec_with_anything_in_it_passes_when_memc_reads_it(
    values: dict[str, Any], key: str, section: str, junk: Any
) -> None:
    values = {name: value for name, value in values.items() if name != "ladder"}
    if section:
        inner = values.get(section)
        values[section] = {**(inner if isinstance(inner, dict) else {}), key: junk}
    elif key != "ladder":
        values[key] = junk
    loaded = read(yaml.safe_dump(values, allow_unicode=True))
    if loaded is not None:
        VALIDATOR.validate(loaded.document.root.value)
