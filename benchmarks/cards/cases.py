"""The configurations that are measured: models of the catalogue with random weights, most informative first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from memc.config import (
    AdapterPrecision,
    Attention,
    Engine,
    LoraConfig,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Reference,
    Task,
    TrainingConfig,
    ZeroConfig,
)
from memc.facts import default_lora_targets, load_fact, load_model, load_model_config, model_from_config
from memc.facts.classifiers import as_classifier, classifier_head
from memc.facts.records import ModelFacts

LORA_RANK = 16

_LLAMA_1B = "meta-llama/Llama-3.2-1B"
_LLAMA_3B = "meta-llama/Llama-3.2-3B"
_LLAMA_8B = "meta-llama/Llama-3.1-8B"
_LLAMA_70B = "meta-llama/Llama-3.1-70B"
_QWEN2_05B = "Qwen/Qwen2.5-0.5B"
_QWEN2_15B = "Qwen/Qwen2.5-1.5B"
_QWEN2_7B = "Qwen/Qwen2.5-7B"
_QWEN2_32B = "Qwen/Qwen2.5-32B"
_QWEN3_17B = "Qwen/Qwen3-1.7B"
_QWEN3_8B = "Qwen/Qwen3-8B"
_QWEN3_14B = "Qwen/Qwen3-14B"
_QWEN3_MOE = "Qwen/Qwen3-30B-A3B"
_GEMMA_2B = "google/gemma-2-2b"
_MISTRAL_7B = "mistralai/Mistral-7B-v0.1"
_PHI_MINI = "microsoft/Phi-3-mini-4k-instruct"
_PHI_2 = "microsoft/phi-2"
_SMOL = "HuggingFaceTB/SmolLM2-360M"
_GPT2 = "openai-community/gpt2-xl"
TINY = "nobody/tiny-llama"
"""A model that a processor trains in milliseconds."""
_TINY_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration.

    Attributes:
        name: Unique, and stable over versions of the list: results are kept under it.
        model: Key in the catalogue.
        method: `full`, `lora-attention`, `lora-all-linear` or `qlora` (adapters on all linears).
        config: The resolved configuration.
    """

    name: str
    model: str
    method: str
    config: TrainingConfig


@cache
def facts_of(model: str, classes: int = 0) -> ModelFacts:
    """Returns the facts of a catalogue model; with `classes`, of the classifier that is made of it."""
    facts = load_model(model, base_dir=Path()) if model != TINY else _tiny_facts()
    return as_classifier(facts, classes) if classes else facts


def config_of(model: str) -> dict[str, Any]:
    """Returns the config.json of a catalogue model, or of the tiny one."""
    return load_model_config(model, base_dir=Path()) if model != TINY else dict(_TINY_CONFIG)


def _tiny_facts() -> ModelFacts:
    return model_from_config(_TINY_CONFIG, key=TINY, file="config.json", source="made up", checked="")


def case(
    model: str,
    method: str = "full",
    *,
    shape: tuple[int, int],
    every: int = 1,
    precision: Precision = Precision.BF16,
    attention: Attention = Attention.SDPA,
    chunked: bool = False,
    optimizer: Optimizer = Optimizer.ADAMW,
    accumulation: int = 1,
    padded: bool = False,
    segments: bool = True,
    task: Task = Task.PRETRAIN,
    reference: Reference = Reference.NONE,
    classes: int = 0,
    new_tokens: int = 0,
    zero_stage: int = 0,
) -> Case:
    """Returns one case.

    Args:
        model: Key in the catalogue.
        method: See `Case`.
        shape: Sequences and tokens of each.
        every: Layers per checkpointed one; 0 keeps all activations.
        precision: Autocast over fp32 weights where all train, or bf16 throughout.
        attention: Implementation.
        chunked: Whether the loss is computed tile by tile.
        optimizer: By its transformers name.
        accumulation: Micro-batches per step.
        padded: Whether an attention mask reaches attention.
        segments: Whether the allocator uses expandable segments.
        task: What is trained for; pairs are padded and their loss is computed tile by tile, texts of classes padded.
        reference: What pairs are compared with.
        classes: Of texts that are sorted.
        new_tokens: Rows of embedding and head that train beside adapters.
        zero_stage: With one, DeepSpeed runs the step and its optimizer lies on the host.
    """
    batch, length = shape
    chunked = chunked or task is Task.DPO
    padded = padded or task in (Task.DPO, Task.CLASSIFICATION)
    config = TrainingConfig(
        task=task,
        method=Method(method.partition("-")[0]),
        precision=precision,
        engine=Engine.SINGLE,
        gpus_per_node=1,
        nodes=1,
        micro_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_length=length,
        packing=not padded,
        padding_mask=padded,
        attention=attention,
        loss=LossHead.CHUNKED if chunked else LossHead.PLAIN,
        checkpoint_every=every,
        optimizer=optimizer,
        lora=None,
        zero=None,
        eval_batch_size=0,
        expandable_segments=segments,
        reference=reference,
        classes=classes,
    )
    if method != "full":
        kind: Literal["attention", "all-linear"] = "attention" if method == "lora-attention" else "all-linear"
        targets = default_lora_targets(facts_of(model), kind)
        lora = LoraConfig(rank=LORA_RANK, alpha=LORA_RANK, dropout=0.0, target_modules=targets, new_tokens=new_tokens)
        if classes:
            lora = replace(lora, modules_to_save=classifier_head(facts_of(model).model_type).trained)
        config = replace(config, lora=lora)
    if zero_stage:
        config = _offloading(config, facts_of(model).hidden_size, zero_stage)
    return Case(name=_name(model, method, config), model=model, method=method, config=config)


def _offloading(config: TrainingConfig, hidden: int, stage: int) -> TrainingConfig:
    """Returns a configuration under DeepSpeed on one card, with its optimizer on the host and buckets as memc's."""
    zero = ZeroConfig(
        stage=stage,
        offload_optimizer=Offload.CPU,
        reduce_bucket_elements=hidden * hidden,
        allgather_bucket_elements=int(load_fact("deepspeed.allgather_bucket_elements").value),
        prefetch_elements=hidden * hidden * 9 // 10,
        persistence_elements=10 * hidden,
        max_live_elements=int(load_fact("deepspeed.max_live_elements").value),
        sub_group_elements=int(load_fact("deepspeed.sub_group_elements").value),
        overlap_comm=True,
    )
    lora = replace(config.lora, precision=AdapterPrecision.BASE) if config.lora is not None else None
    return replace(config, engine=Engine.DEEPSPEED, zero=zero, lora=lora)


def _name(model: str, method: str, config: TrainingConfig) -> str:
    parts = [
        model.partition("/")[2].casefold(),
        method,
        "pure" if config.precision is Precision.BF16_PURE else "amp",
        f"{config.micro_batch_size}x{config.max_length}",
        f"every{config.checkpoint_every}" if config.checkpoint_every else "keep",
        config.attention.value,
        config.loss.value,
        config.optimizer.value,
    ]
    parts += [f"accumulate{config.gradient_accumulation_steps}"] if config.gradient_accumulation_steps > 1 else []
    parts += ["padded"] if config.padding_mask else []
    parts += [] if config.expandable_segments else ["segments-fixed"]
    parts += [config.task.value] if config.task is not Task.PRETRAIN else []
    parts += [config.reference.value] if config.reference is not Reference.NONE else []
    parts += [f"new-tokens{config.lora.new_tokens}"] if config.lora is not None and config.lora.new_tokens else []
    parts += [f"zero{config.zero.stage}-host"] if config.zero is not None else []
    return "_".join(parts)


def cases() -> Iterator[Case]:
    """Yields all cases, most informative first."""
    pure, eager = Precision.BF16_PURE, Attention.EAGER
    foreach, eight, paged = Optimizer.ADAMW_FOREACH, Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT
    yield case(_LLAMA_1B, shape=(4, 2048))
    yield case(_LLAMA_8B, "lora-all-linear", shape=(2, 4096))
    yield case(_LLAMA_8B, "qlora", shape=(2, 4096))
    yield case(_QWEN3_8B, precision=pure, shape=(1, 4096))
    yield case(_LLAMA_1B, shape=(4, 2048), every=0)
    yield case(_LLAMA_1B, shape=(2, 2048), every=0, attention=eager)
    yield case(_LLAMA_1B, shape=(8, 2048), chunked=True)
    yield case(_QWEN2_15B, precision=pure, shape=(4, 4096), optimizer=foreach)
    yield case(_LLAMA_8B, shape=(1, 2048), chunked=True)
    yield case(_GEMMA_2B, shape=(2, 2048), attention=eager)
    yield case(_QWEN3_MOE, "lora-attention", shape=(1, 4096))
    yield case(_MISTRAL_7B, "lora-attention", shape=(4, 2048), every=0, padded=True)
    yield case(_LLAMA_1B, shape=(1, 32768), chunked=True)
    yield case(_QWEN2_7B, "qlora", shape=(4, 2048), padded=True)
    yield case(_LLAMA_3B, shape=(2, 4096), optimizer=eight)
    yield case(_QWEN3_14B, "lora-all-linear", shape=(1, 8192))
    yield case(_QWEN2_05B, shape=(16, 1024), every=2)
    yield case(_PHI_MINI, precision=pure, shape=(4, 2048), every=2)
    yield case(_LLAMA_8B, "lora-all-linear", shape=(1, 4096), every=0)
    yield case(_LLAMA_8B, "lora-all-linear", shape=(1, 32768), chunked=True)
    yield case(_QWEN3_17B, shape=(2, 8192), accumulation=4)
    yield case(_LLAMA_1B, shape=(4, 2048), segments=False)
    yield case(_MISTRAL_7B, precision=pure, shape=(1, 8192), optimizer=foreach)
    yield case(_LLAMA_70B, "qlora", shape=(1, 2048))
    yield case(_QWEN2_05B, shape=(4, 1024), every=0)
    yield case(_SMOL, shape=(8, 2048), every=0, padded=True)
    yield case(_PHI_2, "lora-all-linear", shape=(4, 2048), every=2)
    yield case(_GEMMA_2B, "lora-all-linear", shape=(2, 4096), attention=eager, chunked=True)
    yield case(_QWEN2_7B, precision=pure, shape=(2, 4096), chunked=True, optimizer=eight)
    yield case(_LLAMA_3B, shape=(2, 2048), every=0)
    yield case(_QWEN3_8B, "qlora", shape=(1, 16384), chunked=True)
    yield case(_LLAMA_1B, precision=pure, shape=(1, 1024), every=0)
    yield case(_GPT2, shape=(8, 1024))
    yield case(_QWEN2_32B, "qlora", shape=(1, 4096))
    yield case(_QWEN3_14B, precision=pure, shape=(1, 4096))
    yield case(_LLAMA_3B, shape=(8, 2048), every=0)
    yield case(_LLAMA_1B, shape=(17, 2048), every=0)
    yield case(_LLAMA_1B, shape=(18, 2048), every=0)
    yield case(_LLAMA_8B, "lora-all-linear", shape=(4, 4096), every=0)
    yield case(_LLAMA_1B, shape=(17, 2048), every=0, segments=False)
    yield case(_QWEN3_MOE, "lora-attention", shape=(2, 4096), every=0)
    yield case(_MISTRAL_7B, "qlora", shape=(8, 1024), every=0, padded=True)
    yield case(_QWEN3_17B, shape=(4, 2048), every=0, attention=eager, padded=True)
    yield case(_LLAMA_3B, "lora-attention", shape=(8, 2048), every=2)
    yield case(_QWEN2_15B, shape=(2, 16384), chunked=True)
    yield case(_LLAMA_8B, shape=(1, 4096))
    yield case(_QWEN3_8B, "lora-all-linear", shape=(4, 2048), attention=eager)
    yield case(_PHI_MINI, shape=(2, 4096), optimizer=paged)
    yield case(_LLAMA_1B, shape=(8, 1024), every=0, optimizer=foreach, accumulation=2)
    yield case(_LLAMA_8B, "lora-all-linear", shape=(4, 2048), every=0, padded=True, segments=False)
    yield case(_QWEN2_7B, shape=(1, 2048), chunked=True)
    yield case(_QWEN3_MOE, "lora-attention", shape=(1, 4096), every=0)
    yield case(_QWEN2_15B, "lora-attention", shape=(1, 32768))
    yield case(_SMOL, precision=pure, shape=(32, 1024), optimizer=foreach)
    yield case(_LLAMA_8B, "lora-all-linear", shape=(8, 4096), every=0)
    yield case(_GEMMA_2B, precision=pure, shape=(1, 8192), attention=eager)

    yield from other_tasks()


def other_tasks() -> Iterator[Case]:
    """Yields pairs, classes, packed answers, new tokens, and an optimizer on the host."""
    pairs, frozen = Task.DPO, Reference.MODEL
    yield case(_LLAMA_8B, "lora-all-linear", shape=(2, 2048), task=pairs, reference=Reference.ADAPTERS_OFF)
    yield case(_QWEN3_17B, shape=(2, 2048), task=pairs, reference=frozen)
    yield case(_QWEN3_17B, shape=(2, 2048), task=pairs, reference=Reference.PRECOMPUTED)
    yield case(_LLAMA_8B, "qlora", shape=(1, 4096), task=pairs, reference=Reference.ADAPTERS_OFF)
    yield case(_QWEN3_8B, "lora-all-linear", shape=(8, 1024), task=Task.CLASSIFICATION, classes=4)
    yield case(_LLAMA_1B, shape=(16, 512), task=Task.CLASSIFICATION, classes=2)
    yield case(_LLAMA_8B, "lora-all-linear", shape=(1, 8192), task=Task.SFT, chunked=True)
    yield case(_QWEN3_8B, "qlora", shape=(2, 8192), task=Task.SFT, chunked=True)
    yield case(_LLAMA_8B, "lora-all-linear", shape=(2, 2048), new_tokens=16)
    yield case(_QWEN2_7B, "qlora", shape=(2, 2048), new_tokens=16)
    yield case(_LLAMA_8B, shape=(1, 4096), zero_stage=2, task=Task.SFT, chunked=True)
    yield case(_QWEN3_14B, shape=(1, 2048), zero_stage=3, task=Task.SFT, chunked=True)
    yield case(_LLAMA_8B, "lora-all-linear", shape=(2, 4096), zero_stage=2)


def tiny() -> Iterator[Case]:
    """Yields cases that a CPU runs in seconds, one of each kind of loop."""
    model, pure, shape = TINY, Precision.BF16_PURE, (1, 16)
    adapters = "lora-attention"
    yield case(model, adapters, shape=shape, precision=pure)
    yield case(model, adapters, shape=shape, precision=pure, task=Task.DPO, reference=Reference.ADAPTERS_OFF)
    yield case(model, shape=shape, precision=pure, task=Task.DPO, reference=Reference.MODEL)
    yield case(model, adapters, shape=shape, task=Task.CLASSIFICATION, classes=3)
    yield case(model, adapters, shape=shape, precision=pure, new_tokens=4)
    yield case(model, shape=shape, precision=pure, zero_stage=2)
