"""The modules that ZeRO-3 takes as a whole: their names against transformers, and what DeepSpeed makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from planmaker import make_config, make_plan

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

from memc.config import Engine
from memc.facts.models import model_from_config
from memc.render.documents import ds_config

ARCHITECTURES = Path(__file__).parents[2] / "specs" / "architectures"
SIZES = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "vocab_size": 128,
}


def _routed() -> list[tuple[str, str, str]]:
    """Returns families with experts: name, class of the model, class of the router."""
    found = []
    for path in sorted(ARCHITECTURES.glob("*.yaml")):
        described = yaml.safe_load(path.read_text(encoding="utf-8"))
        mlp = described.get("mlp") or {}
        forms = [form for form in [mlp, *mlp.get("variants", ())] if form.get("experts")]
        found += [(path.stem, described.get("built_class", ""), form.get("router_class", "")) for form in forms]
    return found


@pytest.mark.parametrize(("family", "built", "router"), _routed())
def test_every_family_with_experts_names_the_module_that_routes(family: str, built: str, router: str) -> None:
    import transformers

    assert router, f"{family} has experts and no router_class"
    modelling = __import__(getattr(transformers, built).__module__, fromlist=["_"])
    assert isinstance(getattr(modelling, router), type)


def _section(stage: int) -> dict[str, object]:
    model = model_from_config(SIZES, key="tiny", file="tiny.yaml", source="here", checked="2026-11-30")
    plan = make_plan(config=make_config(engine=Engine.DEEPSPEED, stage=stage))
    section = ds_config(replace(plan, model=model))["zero_optimization"]
    assert isinstance(section, dict)
    return section


def test_deepspeed_takes_every_routing_module_as_a_leaf() -> None:
    import torch
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config
    from transformers import MixtralConfig, MixtralForCausalLM

    leaf = DeepSpeedZeroConfig(**_section(3)).leaf_module
    with torch.device("meta"):
        built = MixtralForCausalLM(MixtralConfig(**SIZES))
    flagged = apply_zero_leaf_module_config(built, leaf)
    assert [type(module).__name__ for module in flagged] == ["MixtralSparseMoeBlock"] * 2


def test_lower_stages_gather_nothing_and_name_no_leaf() -> None:
    assert "leaf_module" not in _section(2)
