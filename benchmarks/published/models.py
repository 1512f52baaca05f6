"""Which model a record means: a catalogue name, a repackaged one, a model of the file beside this, or dimensions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from memc.errors import MemcError
from memc.facts import ModelFacts, load_model
from memc.facts.models import model_from_config, model_rows

from published.records import Record, Skip, read_yaml

_HERE = Path(__file__).parent
_ASIDE = re.compile(r"\s*\(.*?\)")
_REPACKAGED = re.compile(
    r"[-_.](gptq|awq|bnb-4bit|unsloth-bnb-4bit|4bit|int4|nf4|gguf|fp8|hf-gptq|instruct|chat|it)(?=$|[-_.])",
    re.IGNORECASE,
)
_DIMENSIONS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
}
_LLAMA_LIKE = re.compile(r"llama|mistral|vicuna|alpaca|yi-|tinyllama|zephyr|open_llama|solar", re.IGNORECASE)


def read_model(record: Record) -> ModelFacts:
    """Returns the facts of the model that a record names.

    Raises:
        Skip: When neither the name nor the dimensions beside it lead to a known family.
    """
    name = str(record.fields.get("model") or "").strip()
    if not name:
        raise Skip("no model is named")
    dimensions = record.mapping("model_dims")
    for candidate in (name, _plain_name(name)):
        if (facts := _known(candidate)) is not None:
            return facts
    if (facts := _by_last_part(_plain_name(name))) is not None:
        return facts
    if (facts := _by_family(name)) is not None:
        return facts
    if _LLAMA_LIKE.search(name) and (facts := _by_dimensions(name, dimensions)) is not None:
        return facts
    raise Skip("the model's family is not described")


@cache
def _known(name: str) -> ModelFacts | None:
    """Returns a model of the catalogue or of models.yaml."""
    own = _own_models()
    for key, entry in own.items():
        names = {key.casefold(), *(alias.casefold() for alias in entry.get("aliases", ()))}
        if name.casefold() in names:
            return _from_config(key, entry["config"], entry["source"])
    if name.startswith((".", "/", "~")):
        return None
    try:
        return load_model(name, base_dir=_HERE)
    except MemcError:
        return None


def _plain_name(name: str) -> str:
    """Returns the name of the weights that a repackaged or tuned checkpoint starts from, as far as its name says."""
    return _REPACKAGED.sub("", _ASIDE.sub("", name)).strip()


@cache
def _by_last_part(name: str) -> ModelFacts | None:
    """Returns the model whose name without its owner is the same, in the catalogue or in models.yaml."""
    wanted = name.rpartition("/")[2].casefold()
    for row in model_rows():
        for known in (row.key, *row.aliases):
            if _plain_name(known).rpartition("/")[2].casefold() == wanted:
                return _known(known)
    for key in _own_models():
        if key.rpartition("/")[2].casefold() == wanted:
            return _known(key)
    return None


def _by_family(name: str) -> ModelFacts | None:
    """Returns a model of a family whose sizes models.yaml lists."""
    families: Mapping[str, Any] = _document()["families"]
    for entry in families.values():
        found = re.search(entry["matches"], name, re.IGNORECASE)
        size = entry["sizes"].get(found.group("size").casefold()) if found else None
        if size is not None:
            return _from_config(name, {**entry["config"], **size}, entry["source"])
    return None


def _by_dimensions(name: str, dimensions: Mapping[str, Any]) -> ModelFacts | None:
    """Returns a Llama of the dimensions beside the name; None when one is missing or is no number."""
    config: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": False}
    for short, key in _DIMENSIONS.items():
        value = dimensions.get(short)
        if isinstance(value, int):
            config[key] = value
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    if not all(key in config for key in needed):
        return None
    return _from_config(name, config, f"dimensions in the record: {dimensions.get('dims_source', 'as printed')}")


def _from_config(name: str, config: Mapping[str, Any], source: str) -> ModelFacts | None:
    try:
        return model_from_config(config, key=name, file="models.yaml", source=source, checked="2026-11-29")
    except MemcError:
        return None


def _own_models() -> Mapping[str, Any]:
    models: Mapping[str, Any] = _document()["models"]
    return models


@cache
def _document() -> Mapping[str, Any]:
    document: Mapping[str, Any] = read_yaml(_HERE / "models.yaml")
    return document
