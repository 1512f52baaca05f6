"""Counts of the descriptions against models that transformers and PEFT really build, on the meta device."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch to build models")
transformers = pytest.importorskip("transformers", reason="needs transformers to build models")
peft = pytest.importorskip("peft", reason="needs PEFT to build adapters")

from memc.facts import Component, architecture_keys, default_lora_targets, lora_params, model_from_config  # noqa: E402
from memc.facts.architectures import load_architecture  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # by PEFT
]

SEEDS = (0, 1, 2, 3)
GROUPS = (
    (Component.NORM, re.compile(r"norm|\bln_")),
    (Component.EMBEDDING, re.compile(r"embed|\bwte\b|\bwpe\b")),
    (Component.HEAD, re.compile(r"lm_head")),
    (Component.EXPERTS, re.compile(r"experts")),
    (Component.ATTENTION, re.compile(r"attn|attention")),
    (Component.MLP, re.compile(r"mlp|\bfc[12]\b")),
)


def random_config(model_type: str, seed: int) -> dict[str, Any]:
    """Returns a small valid config of a family; keys with a default are left out at random."""
    rng = random.Random(f"{model_type}-{seed}")
    heads = rng.choice([2, 4, 6])
    sizes = {
        "hidden": heads * rng.choice([8, 16, 24]),
        "layers": rng.choice([1, 2, 5]),
        "heads": heads,
        "kv_heads": rng.choice([divisor for divisor in range(1, heads + 1) if heads % divisor == 0]),
        "head_dim": rng.choice([8, 32]),
        "intermediate": rng.choice([40, 72]),
        "vocab": rng.choice([96, 160]),
        "max_positions": rng.choice([32, 64]),
        "experts": rng.choice([2, 8]),
    }
    architecture = load_architecture(model_type)
    fixed = {requirement["name"] for requirement in architecture.get("requires", ())}
    config: dict[str, Any] = {"model_type": model_type}
    for name, rule in architecture["config"].items():
        keys = rule.get("key", [])
        key = keys if isinstance(keys, str) else (keys or [None])[0]
        optional = {"if_missing", "text_if_missing"} & set(rule)
        if key is None or name in fixed or (optional and rng.random() < 0.3):
            continue
        if name in sizes:
            config[key] = sizes[name]
        elif isinstance(rule.get("if_missing"), bool):
            config[key] = rng.random() < 0.5
    if model_type.startswith("gemma") or model_type == "bloom":
        return config
    return {**config, "pad_token_id": 0}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def built(config: dict[str, Any]) -> Any:
    body = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        settings = transformers.AutoConfig.for_model(config["model_type"], **body)
        return transformers.AutoModelForCausalLM.from_config(settings)


def component_of(name: str) -> Component:
    return next(component for component, pattern in GROUPS if pattern.search(name))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", architecture_keys())
def test_counts_by_component_equal_the_built_model(model_type: str, seed: int) -> None:
    config = random_config(model_type, seed)
    facts = model_from_config(config, key="x", file="x/config.json", source="test", checked="")
    model = built(config)
    counts = dict.fromkeys(Component, 0)
    for name, parameter in model.named_parameters():
        counts[component_of(name)] += parameter.numel()
    assert facts.params_by_component() == counts, config
    assert facts.total_params == sum(counts.values())
    assert type(model).__name__ == facts.architecture
    layers = [module for module in model.modules() if type(module).__name__ == facts.groups[0].block.layer_class]
    assert len(layers) == facts.num_layers


@pytest.mark.parametrize("model_type", architecture_keys())
def test_linears_are_the_modules_of_a_layer(model_type: str) -> None:
    config = random_config(model_type, 0)
    facts = model_from_config(config, key="x", file="x/config.json", source="test", checked="")
    block = facts.groups[0].block
    layer = next(m for m in built(config).modules() if type(m).__name__ == block.layer_class)
    found = []
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            shape = (module.in_features, module.out_features)
        elif type(module).__name__ == "Conv1D":
            shape = tuple(module.weight.shape)
        else:
            continue
        found.append((name.rsplit(".", 1)[-1], *shape, module.bias is not None))
    described = [(linear.name, linear.in_features, linear.out_features, linear.bias) for linear in block.linears]
    assert sorted(described) == sorted(found)


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("model_type", architecture_keys())
def test_lora_counts_equal_peft(model_type: str, seed: int) -> None:
    config = random_config(model_type, seed)
    facts = model_from_config(config, key="x", file="x/config.json", source="test", checked="")
    rank = 4 + seed
    everything, attention = default_lora_targets(facts, "all-linear"), default_lora_targets(facts, "attention")
    fused_experts = facts.groups[0].block.tensors  # PEFT's own all-linear adapts those too; the names do not
    targets: str | list[str] = list(everything) if fused_experts else "all-linear"
    assert lora_params(facts, everything, rank) == trainable(config, rank, targets)
    assert lora_params(facts, attention, rank) == trainable(config, rank, list(attention))


def trainable(config: dict[str, Any], rank: int, target_modules: str | list[str]) -> int:
    """Returns what PEFT would train on the built model."""
    conv1d = config["model_type"] == "gpt2"
    settings = peft.LoraConfig(r=rank, target_modules=target_modules, task_type="CAUSAL_LM", fan_in_fan_out=conv1d)
    wrapped = peft.get_peft_model(built(config), settings)
    return sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)


def test_catalogue_configs_are_read_as_transformers_reads_them() -> None:
    """A layer's window and the tied head are class defaults: compare them with the config class itself."""
    from memc.facts import load_model, model_rows
    from memc.facts.documents import read_spec

    for row in model_rows():
        if not row.priced:
            continue
        record = read_spec("models", row.key.replace("/", "--"))["config"]
        body = {key: value for key, value in record.items() if key not in ("model_type", "torch_dtype")}
        settings = transformers.AutoConfig.for_model(row.model_type, **body)
        facts = load_model(row.key, base_dir=Path("/"))
        assert facts.tied == settings.tie_word_embeddings, row.key
        assert facts.max_position_embeddings == settings.max_position_embeddings, row.key
        windows = [group.block.attention.sliding_window for group in facts.groups for _ in range(group.count)]
        types = getattr(settings, "layer_types", None) or (
            ["sliding_attention" if settings.sliding_window else "full_attention"] * len(windows)
            if hasattr(settings, "sliding_window")
            else ["full_attention"] * len(windows)
        )
        expected = [settings.sliding_window if kind == "sliding_attention" else None for kind in types]
        assert windows == expected, row.key
