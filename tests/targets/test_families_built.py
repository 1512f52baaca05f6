"""Descriptions of families against models that transformers, PEFT and bitsandbytes really build, on the meta device."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch to build models")
transformers = pytest.importorskip("transformers", reason="needs transformers to build models")
peft = pytest.importorskip("peft", reason="needs PEFT to build adapters")

from memc.facts import (  # noqa: E402
    Component,
    Linear,
    ModelFacts,
    Objective,
    Stack,
    architecture_keys,
    default_lora_targets,
    load_model,
    lora_params,
    model_from_config,
    model_rows,
)
from memc.facts.architectures import load_architecture  # noqa: E402
from memc.facts.documents import read_spec  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # by PEFT
    pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning"),  # by transformers
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # by transformers' DeBERTa
]

SEEDS = (0, 1, 2, 3)
FAMILIES = tuple(key for key in architecture_keys() if not load_architecture(key).get("part_only"))
GROUPS = (
    (Component.HEAD, re.compile(r"lm_head|^head\.dense|cls\.predictions|^decoder\.(weight|bias)|proj_out")),
    (Component.HEAD, re.compile(r"project_out|visual_projection|text_projection|logit_scale|^classifier")),
    (Component.HEAD, re.compile(r"^vocab_(transform|projector)")),
    (Component.NORM, re.compile(r"norm|\bln_|LayerNorm|layernorm|pre_layrnorm")),
    (Component.EMBEDDING, re.compile(r"embed|\bwte\b|\bwpe\b|\bshared\.|encoder\.conv\d|cls_token|project_in")),
    (Component.EXPERTS, re.compile(r"\.experts\.")),
    (Component.ATTENTION, re.compile(r"attn|[aA]ttention|Attention")),
    (
        Component.MLP,
        re.compile(r"mlp|\bffn\b|\bfc[12]\b|DenseReluDense|intermediate|output\.dense|feed_forward|projector|merger"),
    ),
)
HEAD_NORMS = re.compile(r"lm_head\.layer_norm|head\.norm|predictions\.transform\.LayerNorm")


def random_config(model_type: str, seed: int) -> dict[str, Any]:
    """Returns a small valid config of a family; keys with a default are left out at random."""
    rng = random.Random(f"{model_type}-{seed}")
    architecture = load_architecture(model_type)
    config: dict[str, Any] = {"model_type": model_type}
    for part in architecture.get("parts", {}).values():
        config[part["config"]] = random_config(part["model_type"], seed)
    sizes = _sizes(rng)
    if model_type == "llama4_vision_model":
        sizes["intermediate"] = 4 * sizes["hidden"]  # what pixel shuffling makes of the hidden width
    needed = (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "vocab",
        "encoder_layers",
    )  # key heads that a class has may not divide
    fixed = {requirement["name"]: requirement for requirement in architecture.get("requires", ())}
    for name, rule in architecture["config"].items():
        keys = rule.get("key", [])
        key = keys if isinstance(keys, str) else (keys or [None])[0]
        optional = {"if_missing", "text_if_missing"} & set(rule)
        if name in fixed and fixed[name].get("equals") != _class_default(rule) and key is not None:
            value = fixed[name].get("equals")
            config[key] = value if not isinstance(value, str) else config[architecture["config"][value]["key"]]
        elif key is None or name in fixed or (optional and name not in sizes and rng.random() < 0.3):
            continue
        elif name in sizes:
            if rng.random() < 0.85 or (name in needed or not optional):
                config[key] = sizes[name]
        elif isinstance(rule.get("if_missing"), bool):
            config[key] = rng.random() < 0.5
        elif "one_of" in rule and model_type == "t5":
            config[key] = rng.choice(["relu", "gated-gelu", "gated-silu"])
    return {**config, **_extras(model_type, rng, config)}


def _sizes(rng: random.Random) -> dict[str, int]:
    heads = rng.choice([2, 4, 6])
    key_heads = rng.choice([1, 2])
    return {
        "hidden": heads * rng.choice([8, 16, 24]),
        "layers": rng.choice([1, 2, 5]),
        "encoder_layers": rng.choice([1, 3]),
        "heads": heads,
        "encoder_heads": heads,
        "kv_heads": rng.choice([divisor for divisor in range(1, heads + 1) if heads % divisor == 0]),
        "head_dim": rng.choice([8, 32]),
        "rope_dim": rng.choice([4, 8]),
        "nope_dim": rng.choice([8, 16]),
        "value_dim": rng.choice([8, 16]),
        "query_rank": rng.choice([12, 20]),
        "key_rank": rng.choice([12, 20]),
        "first_routed": rng.choice([0, 1, 3]),
        "intermediate": rng.choice([40, 72]),
        "encoder_inner": rng.choice([40, 56]),
        "dense_inner": rng.choice([48, 64]),
        "expert_inner": rng.choice([24, 40]),
        "shared_inner": rng.choice([24, 40]),
        "shared_experts": rng.choice([1, 2]),
        "vocab": rng.choice([96, 160]),
        "max_positions": rng.choice([32, 64]),
        "experts": rng.choice([4, 8]),
        "experts_per_token": rng.choice([1, 2]),
        "sparse_step": rng.choice([1, 2]),
        "routed_every": rng.choice([1, 2]),
        "full_interval": rng.choice([2, 4]),
        "linear_key_heads": key_heads,
        "linear_value_heads": key_heads * rng.choice([1, 2]),
        "linear_key_dim": rng.choice([8, 16]),
        "linear_value_dim": rng.choice([8, 16]),
        "kernel": rng.choice([3, 4]),
        "buckets": rng.choice([8, 16]),
        "image": rng.choice([16, 32]),
        "patch": rng.choice([4, 8]),
        "channels": rng.choice([1, 3]),
        "frames": 2,
        "positions": rng.choice([16, 36]),
        "mel_bins": rng.choice([8, 16]),
        "types": rng.choice([1, 2]),
        "output": rng.choice([24, 32]),
        "projection": rng.choice([16, 24]),
        "embedding_width": heads * 8,
    }


def _extras(model_type: str, rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Returns keys that a family's config class needs so that the small config is valid."""
    if model_type.startswith("gemma") or model_type == "bloom":
        return {}
    if model_type == "whisper":
        return {"pad_token_id": 0, "max_source_positions": 24}
    if model_type == "deberta-v2":
        return {"pad_token_id": 0, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": rng.choice(["layer_norm", "none"])}
    if model_type in ("qwen3_moe", "qwen3_next"):
        return {"pad_token_id": 0, "mlp_only_layers": rng.choice([[], [0], [1, 3]])}
    if model_type.startswith("deepseek"):
        ranked = {} if rng.random() < 0.5 else {"q_lora_rank": None}
        heads = config.get("num_attention_heads")
        return {"pad_token_id": 0, "num_experts_per_tok": 2, "num_key_value_heads": heads, "n_group": 1, **ranked}
    if model_type == "vit":
        return {"num_labels": rng.choice([2, 7])}
    return {"pad_token_id": 0}


def _class_default(rule: dict[str, Any]) -> Any:
    return rule.get("if_missing", rule.get("constant"))


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def built(config: dict[str, Any], facts: ModelFacts) -> Any:
    body = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    with torch.device("meta"):
        settings = transformers.AutoConfig.for_model(config["model_type"], **body)
        if config["model_type"] == "qwen2_vl_vision":  # no automatic class knows this tower
            tower = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
            return tower._from_config(settings)
        return getattr(transformers, facts.auto_class).from_config(settings)


def described(model_type: str, seed: int) -> tuple[dict[str, Any], ModelFacts]:
    config = random_config(model_type, seed)
    return config, model_from_config(config, key="x", file="x/config.json", source="test", checked="")


def component_of(name: str) -> Component:
    if HEAD_NORMS.search(name):
        return Component.NORM
    return next(component for component, pattern in GROUPS if pattern.search(name))


def counted(model: Any) -> dict[Component, int]:
    """Returns elements by component; a head that shares the embedding's tensor may give it its name."""
    counts = dict.fromkeys(Component, 0)
    embedding = model.get_input_embeddings().weight if model.get_output_embeddings() is not None else None
    for name, parameter in model.named_parameters():
        component = Component.EMBEDDING if parameter is embedding else component_of(name)
        counts[component] += parameter.numel()
    return counts


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_counts_by_component_equal_the_built_model(model_type: str, seed: int) -> None:
    config, facts = described(model_type, seed)
    model = built(config, facts)
    counts = counted(model)
    assert facts.params_by_component() == counts, config
    assert facts.total_params == sum(counts.values())
    assert type(model).__name__ == facts.architecture
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    tensors = [tensor for stack in facts.stacks for tensor in stack.tensors]
    assert frozen == sum(tensor.params for tensor in tensors if not tensor.trains)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_loss_is_computed_in_tiles_where_the_layers_stand_apart_from_the_head(model_type: str) -> None:
    config, facts = described(model_type, SEEDS[1])
    if facts.objective in (Objective.CAUSAL_LM, Objective.IMAGE_TEXT_LM):
        model = built(config, facts)
        assert facts.tiled_loss == (model.base_model is not model)  # trl trainer/utils.py add_fused_lm_head


def layers_of(model: Any, facts: ModelFacts) -> Iterator[tuple[Stack, list[Any]]]:
    """Yields each stack with its layer modules, in order."""
    others = [stack.name for stack in facts.other_stacks]
    for stack in facts.stacks:
        classes = {group.block.layer_class for group in stack.groups}
        yield (
            stack,
            [
                module
                for name, module in model.named_modules()
                if type(module).__name__ in classes
                and any(name.startswith(f"{other}.") for other in ([stack.name] if stack.name else others))
                == bool(stack.name)
            ],
        )


def is_linear(module: Any) -> bool:
    """Returns whether an adapter may be put on a module: a router that is a Linear gives two tensors."""
    return type(module).__name__ == "Conv1D" or (
        isinstance(module, torch.nn.Linear) and type(module).__name__ != "Llama4Router"
    )


def shape_of(module: Any) -> tuple[int, int, bool]:
    inside, outside = module.weight.shape if type(module).__name__ == "Conv1D" else reversed(module.weight.shape)
    return inside, outside, module.bias is not None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_blocks_are_the_layers(model_type: str, seed: int) -> None:
    config, facts = described(model_type, seed)
    model = built(config, facts)
    for stack, layers in layers_of(model, facts):
        blocks = [group.block for group in stack.groups for _ in range(group.count)]
        assert len(layers) == len(blocks)
        for block, layer in zip(blocks, layers, strict=True):
            linears = {name: module for name, module in layer.named_modules() if is_linear(module)}
            found = Counter((name.rsplit(".", 1)[-1], *shape_of(module)) for name, module in linears.items())
            assert found == Counter((lin.name, lin.in_features, lin.out_features, lin.bias) for lin in block.linears)
            for linear in block.linears:
                shapes = {shape_of(module) for name, module in linears.items() if f".{name}".endswith(f".{linear.id}")}
                assert (linear.in_features, linear.out_features, linear.bias) in shapes
            assert block.params == sum(parameter.numel() for parameter in layer.parameters())
            names = [name for name, _ in layer.named_parameters()]
            assert all(any(name.endswith(tensor.name) for name in names) for tensor in block.tensors)


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_lora_counts_equal_peft(model_type: str, seed: int) -> None:
    config, facts = described(model_type, seed)
    rank = 4 + seed
    everything, attention = default_lora_targets(facts, "all-linear"), default_lora_targets(facts, "attention")
    assert lora_params(facts, everything, rank) == trainable(config, facts, rank, list(everything))
    assert lora_params(facts, attention, rank) == trainable(config, facts, rank, list(attention))
    plain = facts.auto_class == "AutoModelForCausalLM" and not facts.outer_linears
    fused = any(group.block.tensors for group in facts.groups)  # PEFT's word adapts fused experts besides
    if plain and not fused and all(linear.adaptable for linear, _ in facts.linear_modules()):
        assert lora_params(facts, everything, rank) == trainable(config, facts, rank, "all-linear")


def trainable(config: dict[str, Any], facts: ModelFacts, rank: int, target_modules: str | list[str]) -> int:
    """Returns what PEFT would train on the built model."""
    conv1d = config["model_type"] in ("gpt2",)
    task = "CAUSAL_LM" if facts.auto_class == "AutoModelForCausalLM" else None
    settings = peft.LoraConfig(r=rank, target_modules=target_modules, task_type=task, fan_in_fan_out=conv1d)
    wrapped = peft.get_peft_model(built(config, facts), settings)
    return sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_four_bit_linears_are_those_that_transformers_replaces(model_type: str, seed: int) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes to build 4-bit linears")
    from transformers.integrations import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    config, facts = described(model_type, seed)
    model = built(config, facts)
    skipped = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True)
    replace_with_bnb_linear(model, modules_to_not_convert=skipped, quantization_config=settings)
    found = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    # outside the layers a model without output embeddings may have its classifier replaced too: it is the head
    heads = [facts.head_params] if facts.auto_class == "AutoModelForImageClassification" else []
    expected = Counter(
        {
            (lin.in_features, lin.out_features): sum(n for other, n in quantized(facts) if same(lin, other))
            for lin, _ in quantized(facts)
        }
    )
    counts = Counter((module.in_features, module.out_features) for module in found)
    if heads:
        counts -= Counter({(facts.hidden_size, facts.head_params // (facts.hidden_size + 1)): 1})
    assert counts == expected


def quantized(facts: ModelFacts) -> list[tuple[Linear, int]]:
    return [(linear, count) for linear, count in facts.linear_modules() if linear.quantized]


def same(one: Linear, other: Linear) -> bool:
    return (one.in_features, one.out_features) == (other.in_features, other.out_features)


@pytest.mark.parametrize("key", [row.key for row in model_rows()])
def test_catalogue_counts_by_component(key: str) -> None:
    config = read_spec("models", key.replace("/", "--"))["config"]
    facts = load_model(key, base_dir=Path("/"))
    assert facts.params_by_component() == counted(built(config, facts))


def test_catalogue_configs_are_read_as_transformers_reads_them() -> None:
    """A layer's window and the tied head are class defaults: compare them with the config class itself."""
    for row in model_rows():
        if not row.priced:
            continue
        record = read_spec("models", row.key.replace("/", "--"))["config"]
        body = {key: value for key, value in record.items() if key not in ("model_type", "torch_dtype")}
        settings = transformers.AutoConfig.for_model(row.model_type, **body)
        facts = load_model(row.key, base_dir=Path("/"))
        assert facts.tied == getattr(settings, "tie_word_embeddings", False), row.key  # ViT has no words
        text = settings.get_text_config()
        positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)
        assert facts.max_position_embeddings == positions, row.key
        windows = [group.block.attention.sliding_window for group in facts.groups for _ in range(group.count)]
        assert windows == expected_windows(text, len(windows)), row.key


def expected_windows(settings: Any, layers: int) -> list[int | None]:
    """Returns the window of each layer as the config class has it."""
    window = getattr(settings, "sliding_window", None)
    types = getattr(settings, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    windows = {"sliding_attention": window, "chunked_attention": getattr(settings, "attention_chunk_size", None)}
    return [windows.get(kind) for kind in types]
