"""The ledger against the trace for every priced family of the catalogue, each shrunken to dimensions drawn at random.

Families come from the catalogue by themselves: a config of each is taken, and its depth, widths, heads, vocabulary and
experts are drawn anew. `MEMC_SHRUNKEN_EXAMPLES` says how many models are drawn of each family (1).
"""

from __future__ import annotations

import os
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from trace_cases import config

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.config import Attention
from memc.errors import MemcError
from memc.facts import default_lora_targets, load_gpu, load_model, load_model_config, model_keys
from memc.facts.models import model_from_config
from memc.facts.records import ModelFacts
from memc.ledger import Estimator, ledger_facts
from memc.trace import trace_step

ABOVE, BELOW = 0.03, 0.01
EXAMPLES = int(os.environ.get("MEMC_SHRUNKEN_EXAMPLES", "1"))
FACTS = ledger_facts(load_gpu("a100-sxm4-80gb"))
MORE_RANK = 8
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
KEY_HEADS = ("num_key_value_heads",)
WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
INNER = (
    *("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
    "moe_intermediate_size",
)
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "sep_token_id": 3}


@cache
def families() -> dict[str, str]:
    """Returns a model of the catalogue for every family that the ledger prices, if one config says all of it."""
    found: dict[str, str] = {}
    for key in model_keys():
        fields = load_model_config(key, base_dir=Path())
        if any(isinstance(value, dict) and name.endswith("_config") for name, value in fields.items()):
            continue
        try:
            priced = not load_model(key, base_dir=Path()).unpriced
        except MemcError:
            priced = False
        if priced and len(_texts(fields)) > 0:
            found.setdefault(str(fields["model_type"]), key)
    return found


def _texts(fields: dict[str, Any]) -> list[str]:
    return [name for name in ("vocab_size",) if name in fields]


@st.composite
def shrunken(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Draws a small model of a family: fewer layers of every kind, and heads and widths divided alike."""
    fields = dict(load_model_config(families()[family], base_dir=Path()))
    depth = draw(st.integers(2, 5))
    for name in DEPTHS:
        if fields.get(name):
            before, fields[name] = fields[name], depth
            fields |= {key: value[:depth] for key, value in fields.items() if _is_listed(value, before)}
    present = [fields[name] for name in (*HEADS, *WIDTHS) if fields.get(name)]
    common = gcd(*present)
    part = draw(st.sampled_from([n for n in (2, 4, 8, 16) if common % n == 0] or [1]))
    for name in (*HEADS, *WIDTHS):
        if fields.get(name):
            fields[name] //= part
    for name in KEY_HEADS:
        if fields.get(name):
            fields[name] = max(1, fields[name] // part)
    for name in INNER:
        if fields.get(name):
            fields[name] = 32 * draw(st.integers(2, 40))
    fields["vocab_size"] = draw(st.integers(500, 6000))
    return {**fields, **{name: token for name, token in TOKENS.items() if isinstance(fields.get(name), (int, list))}}


def with_fewer_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns a config with one layer less in every stack; what it lists by layer is as much shorter."""
    depths = {name: fields[name] for name in DEPTHS if fields.get(name)}
    shorter = {
        name: value[:-1] for name, value in fields.items() if any(_is_listed(value, depth) for depth in depths.values())
    }
    return {**fields, **shorter, **{name: depth - 1 for name, depth in depths.items()}}


def _is_listed(value: object, depth: int) -> bool:
    return isinstance(value, list) and len(value) == depth


@st.composite
def modes(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the settings of a run."""
    batch, length = draw(st.sampled_from(((1, 512), (3, 200))))
    return {
        "method": draw(st.sampled_from(("full", "lora", "qlora"))),
        "precision": draw(st.sampled_from(("bf16", "bf16_pure"))),
        "attention": draw(st.sampled_from(("sdpa", "eager"))),
        "checkpoint_every": draw(st.sampled_from((0, 1, 2))),
        "mask": batch > 1 and draw(st.booleans()),
        "batch": batch,
        "length": length,
        "rank": draw(st.sampled_from((4, 16))),
        "targets": draw(st.sampled_from(("attention", "all-linear"))),
    }


def _priced(facts: ModelFacts, mode: dict[str, Any]) -> int:
    bill = Estimator(facts, FACTS).ledger(config(**mode)).gpu
    return bill.peak_allocated_bytes - 2 * FACTS.cublas_workspace_bytes


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # published configs have it
@pytest.mark.parametrize("family", sorted(families()))
@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_ledger_is_the_trace_on_shrunken_models(family: str, data: st.DataObject) -> None:
    model, mode = data.draw(shrunken(family)), data.draw(modes())
    try:
        facts = model_from_config(model, key="case", file="config.json", source="test", checked="2026-01-01")
    except MemcError:
        reject()
    mode["length"] = min(mode["length"], facts.max_position_embeddings or mode["length"])
    mode["targets"] = default_lora_targets(facts, mode["targets"])
    if any(group.block.attention.logit_softcap or group.block.attention.eager_only for group in facts.groups):
        mode["attention"] = Attention.EAGER.value
    traced = trace_step(config(**mode), model).peak_allocated_bytes
    off = (_priced(facts, mode) - traced) / traced
    assert -BELOW <= off <= ABOVE, f"{off:+.2%} of {traced} B"
    more = {**mode, "batch": mode["batch"] + 1}
    longer = {**mode, "length": mode["length"] - 64}
    assert _priced(facts, longer) <= _priced(facts, mode) <= _priced(facts, more)
    assert _priced(facts, mode) <= _priced(facts, {**mode, "rank": mode["rank"] + MORE_RANK})
    shallow = model_from_config(
        with_fewer_layers(model), key="case", file="config.json", source="test", checked="2026-01-01"
    )
    assert _priced(shallow, mode) <= _priced(facts, mode)
