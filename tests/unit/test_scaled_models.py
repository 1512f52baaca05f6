"""Configs that reports' sketches are planned with: families scaled to stated dimensions and parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from memc.facts import load_model_config
from memc.facts.models import model_from_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from reported.scaling import scaled

CASES: tuple[tuple[str, dict[str, int], float], ...] = (
    ("bigscience/bloom-560m", {"hidden": 2048, "vocab": 250880}, 1.7e9),
    ("Qwen/Qwen1.5-MoE-A2.7B", {"layers": 28, "hidden": 3584, "experts": 64}, 57.4e9),
    ("meta-llama/Llama-2-7b-hf", {"layers": 48, "hidden": 5120}, 20e9),
    ("openai-community/gpt2", {}, 3e9),
    ("Qwen/Qwen2.5-7B", {"hidden": 52 * 128}, 28e9),
)


@pytest.mark.parametrize(("key", "stated", "wanted"), CASES)
def test_a_family_is_scaled_to_dimensions_and_parameters(key: str, stated: dict[str, int], wanted: float) -> None:
    config = scaled(load_model_config(key, base_dir=Path()), stated, wanted)
    assert config is not None
    facts = model_from_config(config, key="made", file="config.json", source="test", checked="")
    assert facts.total_params == pytest.approx(wanted, rel=0.02)
    found = {"layers": facts.num_layers, "hidden": facts.hidden_size, "vocab": facts.vocab_size}
    found["experts"] = facts.groups[0].block.mlp.experts
    assert {name: found[name] for name in stated} == stated
    attention = facts.groups[0].block.attention
    assert attention.heads % attention.kv_heads == 0


def test_a_composed_family_is_not_scaled() -> None:
    assert scaled(load_model_config("llava-hf/llava-1.5-7b-hf", base_dir=Path()), {"layers": 8}, 0) is None
