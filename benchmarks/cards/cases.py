"""The configurations that are measured: models of the catalogue with random weights, most informative first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from memc.config import Attention, Engine, LoraConfig, LossHead, Method, Optimizer, Precision, Task, TrainingConfig
from memc.facts import default_lora_targets, load_model, load_model_config
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
def facts_of(model: str) -> ModelFacts:
    """Returns the facts of a catalogue model."""
    return load_model(model, base_dir=Path())


def config_of(model: str) -> dict[str, Any]:
    """Returns the config.json of a catalogue model."""
    return load_model_config(model, base_dir=Path())


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
    """
    batch, length = shape
    config = TrainingConfig(
        task=Task.PRETRAIN,
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
    )
    if method != "full":
        kind: Literal["attention", "all-linear"] = "attention" if method == "lora-attention" else "all-linear"
        targets = default_lora_targets(facts_of(model), kind)
        lora = LoraConfig(rank=LORA_RANK, alpha=LORA_RANK, dropout=0.0, target_modules=targets)
        config = replace(config, lora=lora)
    return Case(name=_name(model, method, config), model=model, method=method, config=config)


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


def tiny() -> Case:
    """Returns a case that a CPU runs in seconds."""
    return case("HuggingFaceTB/SmolLM2-135M", "lora-attention", shape=(1, 16), precision=Precision.BF16_PURE)
