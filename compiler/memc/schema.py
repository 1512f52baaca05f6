"""The spec as a JSON schema (draft 2020-12): what an editor completes, explains and underlines."""

from __future__ import annotations

import json
from typing import Any

from memc.facts import gpu_keys, model_keys
from memc.ladder import technique_names
from memc.spec import Section, Spec
from memc.spec_sentences import add_sentences

PUBLISHED_URL = "https://json.schemastore.org/memc.json"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILE_MATCH = ("memc.yaml", "memc.yml", "*.memc.yaml", "*.memc.yml")
_DESCRIPTION = "What memc compiles: which model, which data, which hardware, how much memory, how much time."
_EXAMPLES: dict[str, list[Any]] = {
    "Data.train": ["data/train.jsonl"],
    "Data.eval": ["data/eval.jsonl"],
    "Hardware.host_memory": ["64GiB", "1TiB"],
    "Hardware.nvme": ["2TB"],
    "Memory.target": ["auto", "22GiB"],
    "Memory.reserve": ["1GiB"],
    "Time.budget": ["24h", "90min", "3d", "$40", "none"],
    "Pin.activation_checkpointing": [True, False, 2],
    "Lora.target_modules": ["all-linear", ["q_proj", "v_proj"]],
    "Spec.method": ["auto", "lora", ["full", "lora"]],
}


def spec_schema(url: str = PUBLISHED_URL) -> dict[str, Any]:
    """Returns the JSON schema of a spec; it accepts every valid spec and refuses unknown keys and wrong types.

    What one field alone cannot tell (two fields that contradict each other, a name that the catalogue lacks) passes the
    schema and is said by `memc compile`.

    Args:
        url: Its `$id`.
    """
    add_sentences()
    schema = Spec.model_json_schema(by_alias=True)
    definitions = schema["$defs"]
    _name_techniques(definitions["Ladder"])
    owners = {**definitions, "Spec": schema}
    for place, examples in _EXAMPLES.items():
        owner, _, field = place.partition(".")
        owners[owner]["properties"][field]["examples"] = examples
    schema["properties"]["model"]["examples"] = list(model_keys())
    definitions["Hardware"]["properties"]["gpu"]["examples"] = list(gpu_keys())
    for field in ("data", "hardware"):  # written as text for the errors; a schema needs values
        schema["properties"][field].pop("examples", None)
    _title_fields(schema)
    head = {"$schema": DIALECT, "$id": url, "title": "memc spec", "description": _DESCRIPTION}
    return {**head, **{key: value for key, value in schema.items() if key not in head}}


def modeline(url: str = PUBLISHED_URL) -> str:
    """Returns the first line of a spec that tells editors (through yaml-language-server) where its schema is."""
    return f"# yaml-language-server: $schema={url}"


def schemastore_entry(url: str = PUBLISHED_URL) -> dict[str, Any]:
    """Returns the entry for the catalog of SchemaStore, which gives editors the schema by file name."""
    return {"name": "memc spec", "description": _DESCRIPTION, "fileMatch": list(FILE_MATCH), "url": url}


def schema_text(url: str = PUBLISHED_URL) -> str:
    """Returns the schema as it is published: indented, keys in the order of the spec, a new line at the end."""
    return json.dumps(spec_schema(url), indent=2, ensure_ascii=False) + "\n"


def _name_techniques(ladder: dict[str, Any]) -> None:
    for field in ("forbid", "require"):
        items = {"type": "string", "enum": list(technique_names())}
        ladder["properties"][field] |= {"items": items, "uniqueItems": True}


def _title_fields(schema: dict[str, Any]) -> None:
    """Gives each field its own name as title, which is what a person has to write, and its sentence."""
    sections = {name: info.annotation for name, info in Spec.model_fields.items()}
    owners: list[type[Section]] = [Spec]
    owners += [owner for owner in sections.values() if isinstance(owner, type) and issubclass(owner, Section)]
    for owner in owners:
        fields = (schema if owner is Spec else schema["$defs"][owner.__name__])["properties"]
        for name, info in owner.model_fields.items():
            fields[name] |= {"title": name, "description": info.description}
