"""The cases: eight models in nine modes on one, 2, 8 and 64 GPUs, each pinned down to the last choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memc.facts import load_gpu, load_model
from memc.facts.records import ModelFacts

RANKS = (2, 8, 64)
ENDS = ("0", "last")
GPUS_PER_NODE = 8
SAMPLES = 64


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and the pass that it is trained with: passes differ so that each kind is seen.

    Attributes:
        key: In the catalogue.
        length: Tokens of a sequence.
        micro_batch_size: Sequences of a pass.
        accumulation: Passes of a step.
        checkpointing: Every how many layers' inputs alone are kept; 0 keeps all activations.
        loss: ``plain`` or ``chunked``.
    """

    key: str
    length: int
    micro_batch_size: int = 1
    accumulation: int = 1
    checkpointing: int = 1
    loss: str = "plain"


SUBJECTS = (
    Subject(key="meta-llama/Llama-3.2-1B", length=2048, micro_batch_size=2, accumulation=2, checkpointing=0),
    Subject(key="Qwen/Qwen2.5-3B", length=4096),
    Subject(key="google/gemma-2-2b", length=1024, accumulation=2),
    Subject(key="microsoft/Phi-4-mini-instruct", length=2048, loss="chunked"),
    Subject(key="mistralai/Mistral-7B-v0.3", length=2048, micro_batch_size=2, accumulation=4),
    Subject(key="meta-llama/Llama-3.1-8B", length=4096),
    Subject(key="Qwen/Qwen3-14B", length=2048, accumulation=2, loss="chunked"),
    Subject(key="Qwen/Qwen2.5-32B", length=1024),
)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a model is trained.

    Attributes:
        name: One word.
        method: ``full``, ``lora`` or ``qlora``.
        pin: What else is fixed.
        ranks: Numbers of GPUs that it is tried on.
        state_bytes: Bytes per parameter that are spread over the ranks; decides the card, and nothing else.
        whole_bytes: Bytes per parameter that each GPU holds whole.
        played: The ranks that are rehearsed: more than one where gradients are kept by whole parameters, of which
            ranks have more or fewer.
    """

    name: str
    method: str
    pin: tuple[tuple[str, Any], ...]
    ranks: tuple[int, ...]
    state_bytes: int
    whole_bytes: int
    played: tuple[str, ...] = ("0",)


def _zero(stage: int, **more: Any) -> tuple[tuple[str, Any], ...]:
    placed = {"offload_optimizer": "none", "offload_param": "none"} | more
    return (("engine", "deepspeed"), ("zero_stage", stage), *placed.items())


_FSDP = (("engine", "fsdp"), ("fsdp_version", 2), ("reshard_after_forward", True), ("offload_param", "none"))

MODES = (
    Mode(name="full", method="full", pin=(("engine", "single"),), ranks=(1,), state_bytes=0, whole_bytes=18),
    Mode(name="lora", method="lora", pin=(("engine", "single"),), ranks=(1,), state_bytes=0, whole_bytes=3),
    Mode(name="qlora", method="qlora", pin=(("engine", "single"),), ranks=(1,), state_bytes=0, whole_bytes=2),
    Mode(name="zero-1", method="full", pin=_zero(1), ranks=RANKS, state_bytes=18, whole_bytes=5, played=ENDS),
    Mode(name="zero-2", method="full", pin=_zero(2), ranks=RANKS, state_bytes=18, whole_bytes=5, played=ENDS),
    Mode(name="zero-3", method="full", pin=_zero(3), ranks=RANKS, state_bytes=20, whole_bytes=1),
    Mode(
        name="zero-2-offload",
        method="full",
        pin=_zero(2, offload_optimizer="cpu"),
        ranks=RANKS,
        state_bytes=10,
        whole_bytes=5,
    ),
    Mode(
        name="zero-3-offload",
        method="full",
        pin=_zero(3, offload_optimizer="cpu", offload_param="cpu"),
        ranks=RANKS,
        state_bytes=4,
        whole_bytes=1,
    ),
    Mode(name="fsdp2", method="full", pin=_FSDP, ranks=RANKS, state_bytes=20, whole_bytes=1),
)

CARDS = ("h100-sxm5-80gb", "h200-sxm-141gb")
_ROOM = 0.72
"""Share of a card that weights and states may take in a case."""


@dataclass(frozen=True)
class Case:
    """One model in one mode on a number of GPUs."""

    subject: Subject
    mode: Mode
    ranks: int

    @property
    def name(self) -> str:
        """Its name in tables: model, mode and ranks."""
        return f"{self.subject.key} {self.mode.name} {self.ranks}"

    @property
    def card(self) -> str:
        """The smallest card that has room for it; empty when none has."""
        params = facts_of(self.subject.key).total_params
        need = params * (self.mode.whole_bytes + self.mode.state_bytes / self.ranks)
        for key in CARDS:
            if need <= _ROOM * (load_gpu(key).capacity_bytes or 0):
                return key
        return ""

    def spec(self) -> dict[str, Any]:
        """Returns the spec, with every choice pinned that decides memory."""
        subject, mode = self.subject, self.mode
        nodes = max(1, self.ranks // GPUS_PER_NODE)
        batch = subject.micro_batch_size * subject.accumulation * self.ranks
        pin = {
            "precision": "bf16",
            "optimizer": "adamw_torch_fused",
            "micro_batch_size": subject.micro_batch_size,
            "gradient_accumulation_steps": subject.accumulation,
            "activation_checkpointing": subject.checkpointing,
            "attention": "eager" if _eager(subject.key) else "sdpa",
            "loss": subject.loss,
            "expandable_segments": True,
            **dict(mode.pin),
        }
        spec: dict[str, Any] = {
            "model": subject.key,
            "task": "pretrain",
            "data": {
                "train": "train.jsonl",
                "max_length": subject.length,
                "packing": True,
                "samples": batch * 10,
                "mean_tokens": subject.length,
            },
            "method": mode.method,
            "training": {"epochs": 1, "global_batch_size": batch},
            "hardware": {
                "gpu": self.card,
                "count": min(self.ranks, GPUS_PER_NODE),
                "nodes": nodes,
                "host_memory": "16TiB",
            },
            "pin": pin,
        }
        if nodes > 1:
            spec["hardware"]["network_gbit_per_second"] = 3200
        if mode.method != "full":
            spec["lora"] = {"rank": 16}
        return spec


@cache
def facts_of(key: str) -> ModelFacts:
    """Returns the facts of a catalogue model."""
    return load_model(key, base_dir=Path())


def _eager(key: str) -> bool:
    """Returns whether a model's attention has no other implementation."""
    return any(group.block.attention.logit_softcap for group in facts_of(key).groups)


def cases() -> Iterator[Case]:
    """Yields every case."""
    for subject in SUBJECTS:
        for mode in MODES:
            for ranks in mode.ranks:
                yield Case(subject, mode, ranks)


def write_spec(case: Case, folder: Path) -> Path:
    """Writes a case's spec and its data into `folder`, and returns the spec's path."""
    folder.mkdir(parents=True, exist_ok=True)
    row = json.dumps({"text": "word " * (case.subject.length * 2)})
    (folder / "train.jsonl").write_text(f"{row}\n" * SAMPLES, encoding="utf-8")
    path = folder / "spec.yaml"
    path.write_text(json.dumps(case.spec(), indent=1), encoding="utf-8")
    return path
