"""The cases: every model of the catalogue, in every mode that the ledger is held to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from memc.config import (
    Attention,
    Engine,
    LoraConfig,
    LossHead,
    Method,
    Optimizer,
    Precision,
    Task,
    TrainingConfig,
)
from memc.errors import MemcError
from memc.facts import default_lora_targets, load_model, load_model_config, model_keys
from memc.facts.records import ModelFacts

LORA_RANK = 16
METHODS = ("full", "lora-attention", "lora-all", "qlora")
CHECKPOINTING = {"none": 0, "every-2": 2, "every-layer": 1}
ATTENTIONS = (Attention.SDPA, Attention.EAGER)
SHAPES = {"1x2048": (1, 2048), "4x512": (4, 512)}
"""Sequences x tokens. More than one sequence is padded, so a mask reaches attention; a model that takes fewer tokens
gets as many as it takes."""

_DECIDES_NOTHING = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_bias_init",
        "bos_token_id",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_factor",
        "initializer_range",
        "label2id",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "pad_token_id",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sep_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True, order=True)
class Mode:
    """How a model is trained in a case; its name is one word of the traces' table."""

    method: str
    checkpointing: str
    attention: str
    shape: str

    def __str__(self) -> str:
        return "/".join((self.method, self.checkpointing, self.attention, self.shape))


MODES: tuple[Mode, ...] = tuple(
    Mode(method, checkpointing, attention.value, shape)
    for method, checkpointing, attention, shape in product(METHODS, CHECKPOINTING, ATTENTIONS, SHAPES)
)


@dataclass(frozen=True)
class Shape:
    """Models of the catalogue that are one to ledger and trace; the first stands for all."""

    models: tuple[str, ...]
    model_type: str

    @property
    def key(self) -> str:
        """The model that is traced."""
        return self.models[0]


@cache
def facts_of(key: str) -> ModelFacts:
    """Returns the facts of a catalogue model.

    Raises:
        MemcError: When its family has no description.
    """
    return load_model(key, base_dir=Path())


def config_of(key: str) -> dict[str, Any]:
    """Returns the config.json of a catalogue model."""
    return load_model_config(key, base_dir=Path())


def shapes(wanted: Mapping[str, object] | None = None) -> tuple[Shape, ...]:
    """Returns the catalogue's models by what they look like, duplicates together, in the catalogue's order.

    Args:
        wanted: Keys to keep; None keeps all.
    """
    found: dict[str, list[str]] = {}
    for key in model_keys():
        if wanted is None or key in wanted:
            found.setdefault(shape_digest(key), []).append(key)
    return tuple(Shape(tuple(keys), config_of(keys[0])["model_type"]) for keys in found.values())


def shape_digest(key: str) -> str:
    """Returns a digest of all that decides a model's memory in the cases; equal for models that are one to both.

    A limit on positions counts only where positions are learned, and so is left to the parameter count.
    """
    config = _bare(config_of(key))
    longest = max(length for _, length in SHAPES.values())
    positions = config.pop("max_position_embeddings", None)
    limited = positions if isinstance(positions, int) and positions < longest else None
    try:
        params = facts_of(key).total_params
    except MemcError:
        params = -1
    text = json.dumps([config, limited, params, positions if params < 0 else None], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _bare(value: Any) -> Any:
    """Returns a config without what decides nothing; a switch that is off is as good as absent."""
    if isinstance(value, dict):
        kept = {name: item for name, item in value.items() if name not in _DECIDES_NOTHING}
        return {name: _bare(item) for name, item in kept.items() if item is not None and item is not False}
    return [_bare(item) for item in value] if isinstance(value, list) else value


def training_config(model: ModelFacts, mode: Mode) -> TrainingConfig:
    """Returns the configuration of a case: one GPU, bf16 autocast over fp32 weights where all of them train.

    Raises:
        MemcError: When the model has no linears that adapters could stand on.
    """
    batch, length = SHAPES[mode.shape]
    method, targets = Method(mode.method.partition("-")[0]), _targets(model, mode.method)
    config = TrainingConfig(
        task=Task.PRETRAIN,
        method=method,
        precision=Precision.BF16,
        engine=Engine.SINGLE,
        gpus_per_node=1,
        nodes=1,
        micro_batch_size=batch,
        gradient_accumulation_steps=1,
        max_length=min(length, model.max_position_embeddings or length),
        packing=batch == 1,
        padding_mask=batch > 1,
        attention=Attention(mode.attention),
        loss=LossHead.PLAIN,
        checkpoint_every=CHECKPOINTING[mode.checkpointing],
        optimizer=Optimizer.ADAMW,
        lora=None,
        zero=None,
        eval_batch_size=0,
    )
    if method is Method.FULL:
        return config
    lora = LoraConfig(rank=LORA_RANK, alpha=LORA_RANK, dropout=0.0, target_modules=targets)
    return replace(config, lora=lora)


def _targets(model: ModelFacts, method: str) -> tuple[str, ...]:
    kind: Literal["attention", "all-linear"] = "attention" if method.endswith("attention") else "all-linear"
    return default_lora_targets(model, kind)


def why_not(shape: Shape, mode: Mode) -> str:
    """Returns why a case cannot be: what transformers or the model has not; empty when it can."""
    try:
        model = facts_of(shape.key)
    except MemcError as error:
        return error.diagnostics[0].code
    attentions = [group.block.attention for group in model.groups]
    if mode.attention != Attention.EAGER.value and any(one.eager_only or one.logit_softcap for one in attentions):
        return "its attention has no SDPA path"
    if mode.method != "full" and not _targets(model, mode.method):
        return "no linear to adapt"
    return ""


def cases(among: tuple[Shape, ...]) -> Iterator[tuple[Shape, Mode]]:
    """Yields every case, shape by shape."""
    for shape in among:
        for mode in MODES:
            yield shape, mode
