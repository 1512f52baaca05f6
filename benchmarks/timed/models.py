"""The model of a record: by catalogue name, by a family and a size, or by the dimensions that the record prints."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from memc.errors import MemcError
from memc.facts import ModelFacts, NormKind, load_model, model_from_config, model_rows

from timed.reading import UnreadableError, number, text

_SHAPES = Path(__file__).with_name("shapes.yaml")
_GAP = 0.25  # a size further than this from every shape of its family is another model


@cache
def _names() -> dict[str, str]:
    """Returns the catalogue's names, folded, with the key that each stands for."""
    found: dict[str, str] = {}
    for row in model_rows():
        for name in (row.key, *row.aliases):
            for folded in (_folded(name), _folded(name.rpartition("/")[2])):
                found.setdefault(folded, name)
    return found


def _folded(name: str) -> str:
    """Returns a name without case, punctuation and the suffixes that change no shape."""
    name = re.sub(r"\(.*?\)", " ", name.casefold())
    name = re.sub(
        r"\b(meta|nousresearch|hf|instruct|chat|base|pt|it|unsloth|bnb|4bit)\b", " ", re.sub(r"[-_/]", " ", name)
    )
    return re.sub(r"[^a-z0-9.]", "", name)


def model_of(record: dict[str, Any]) -> tuple[ModelFacts, str]:
    """Returns the model of a record, and a note when its shape was inferred.

    Raises:
        UnreadableError: When neither its name nor its dimensions say what it computes.
    """
    name, params = text(record.get("model")), number(record.get("params_b"))
    if not name:
        raise UnreadableError("model not named")
    if re.search(r"vla\b|\bvit\b|vit-|truncated|idefics", name, re.IGNORECASE):
        raise UnreadableError("not a text model, or a part of one")
    printed = _printed_dims(f"{name} {text(record.get('dims'))}")
    if not (printed.get("hidden") and printed.get("layers")):
        known = _catalogue(name)
        if known is not None:
            return known, ""
    family = _family(name)
    if printed.get("hidden") or printed.get("layers") or family:
        return _shaped(family or "gpt3", name, params, printed)
    if params is not None and re.fullmatch(r"[\d.]+ ?b", name.strip(), re.IGNORECASE):
        return _shaped("llama", name, params, {})
    raise UnreadableError(f"shape of {name} is not known")


@cache
def _catalogue(name: str) -> ModelFacts | None:
    names = _names()
    key = names.get(_folded(name)) or names.get(_folded(_RENAMED.get(_folded(name), "")))
    if key is None:
        return None
    try:
        return load_model(key, base_dir=Path("/nonexistent"))
    except MemcError:
        return None


# Names that people use for a catalogue model of the same shape.
_RENAMED = {
    "llama27b": "meta-llama/Llama-2-7b-hf",
    "llama213b": "meta-llama/Llama-2-13b-hf",
    "llama270b": "meta-llama/Llama-2-70b-hf",
    "llama7b": "meta-llama/Llama-2-7b-hf",
    "llama13b": "meta-llama/Llama-2-13b-hf",
    "llama70b": "meta-llama/Llama-2-70b-hf",
    "llama38b": "meta-llama/Meta-Llama-3-8B",
    "llama370b": "meta-llama/Meta-Llama-3-70B",
    "mistral7b": "mistralai/Mistral-7B-v0.1",
    "mixtral8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "yi34b": "01-ai/Yi-1.5-34B",
    "yi6b": "01-ai/Yi-1.5-6B",
    "qwen27b": "Qwen/Qwen2.5-7B",
    "bertlarge": "google-bert/bert-large-uncased",
    "bertbase": "google-bert/bert-base-uncased",
    "falcon7b": "tiiuae/falcon-7b",
    "tinyllama1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "gpt2": "openai-community/gpt2",
    "phi2": "microsoft/phi-2",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "gemma2b": "google/gemma-2-2b",
    "gpt124m": "openai-community/gpt2",
}


def _family(name: str) -> str:
    folded = name.casefold()
    if "modalities" in folded:
        return "modalities"
    if "mpt" in folded:
        return "mpt"
    if re.search(r"phi-?1", folded):
        return "phi"
    if "llama" in folded:
        return "llama"
    if re.search(r"gpt|megatron|mt-nlg|roberta-10b", folded):
        return "gpt3"
    return ""


def _printed_dims(words: str) -> dict[str, int]:
    """Returns the dimensions that a record prints, as ``d4096 L50 h32 kv8`` or ``NHIDDEN=13824``."""
    patterns = {
        "hidden": r"\b(?:d|d_model|hidden|nhidden)[ =:]?(\d{3,6})\b",
        "layers": r"\b(?:l|n_layers?|layers|nlayers)[ =:]?(\d{1,3})\b",
        "heads": r"\b(?:h|n_heads?|heads|nheads)[ =:]?(\d{1,3})\b",
        "kv_heads": r"\b(?:kv|kv_heads)[ =:]?(\d{1,3})\b",
        "intermediate": r"\b(?:ffn?|i|intermediate)[ =:]?(\d{3,6})\b",
    }
    found = {key: re.search(pattern, words, re.IGNORECASE) for key, pattern in patterns.items()}
    return {key: int(match.group(1)) for key, match in found.items() if match is not None}


def _shaped(family: str, name: str, params: float | None, printed: dict[str, int]) -> tuple[ModelFacts, str]:
    """Returns a model of a family in the printed or the nearest published shape."""
    known = yaml.safe_load(_SHAPES.read_text(encoding="utf-8"))[family]
    shape, note = dict(printed), ""
    if not (shape.get("hidden") and shape.get("layers")):
        params = params or _size_in(name)
        if params is None:
            raise UnreadableError(f"size of {name} is not printed")
        nearest = min(known["shapes"], key=lambda entry: abs(entry["params_b"] / params - 1))
        far = abs(nearest["params_b"] / params - 1)
        if far > _GAP and not shape:
            raise UnreadableError(f"no published shape near the size of {name}")
        hidden = shape.get("hidden", nearest["hidden"])
        layers = nearest["layers"]
        if far > _SAME or "hidden" in shape:  # the same width, as many layers as the parameters ask for
            layers = max(1, round((params * 1e9 - known["vocab_size"] * hidden) / (12 * hidden**2)))
        shape = {**nearest, **shape, "hidden": hidden, "layers": shape.get("layers", layers)}
        note = f"shape of {name} taken from {family} of {nearest['params_b']}B"
    config = _config(shape, known)
    facts = model_from_config(config, key=name, file=name, source="dimensions of the record", checked="")
    return (_with_layer_norms(facts) if known["gated"] and known["norm"] == "layer" else facts), note


_SAME = 0.06  # a printed size this near to a shape's is a rounded one


def _size_in(name: str) -> float | None:
    """Returns the size that a name ends with, in billions: ``llama-1B``, ``GPT3-125M``."""
    said = re.search(r"(\d+(?:\.\d+)?) ?([BM])\b", name, re.IGNORECASE)
    if said is None:
        return None
    return float(said.group(1)) * (1.0 if said.group(2).upper() == "B" else 1e-3)


def _config(shape: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json of a plain decoder of that shape."""
    hidden = shape["hidden"]
    heads = shape.get("heads") or max(1, hidden // 128)
    if hidden % heads:
        heads = max(1, hidden // 128)
    if known["gated"]:
        return {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": shape["layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": shape.get("kv_heads", heads),
            "head_dim": max(1, hidden // heads),
            "intermediate_size": shape.get("intermediate") or _llama_inner(hidden),
            "vocab_size": known["vocab_size"],
        }
    return {
        "model_type": "starcoder2" if known["rotary"] else "gpt2",
        "n_embd": hidden,
        "hidden_size": hidden,
        "n_layer": shape["layers"],
        "num_hidden_layers": shape["layers"],
        "n_head": heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": known["vocab_size"],
        "activation_function": "gelu",
        "hidden_act": "gelu",
    }


def _with_layer_norms(facts: ModelFacts) -> ModelFacts:
    """Returns the same model with torch's LayerNorm in place of RMS norms."""
    groups = tuple(
        replace(
            group,
            block=replace(group.block, norms=tuple(replace(norm, kind=NormKind.LAYER) for norm in group.block.norms)),
        )
        for group in facts.groups
    )
    return replace(facts, groups=groups)


def _llama_inner(hidden: int) -> int:
    """Returns the inner width that Llama's rule gives: two thirds of four times the width, up to a multiple of 256."""
    return -(-(8 * hidden // 3) // 256) * 256
