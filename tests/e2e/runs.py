"""Which cases of the matrix really train on two CPU cores, as what, and why the others cannot."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from folder import DATA
from matrix import kind_of, matrix
from memc.config import Attention, Engine, Method, Offload, Optimizer, Precision, Task, TrainingConfig
from planmaker import make_config

TORCHVISION = find_spec("torchvision") is not None
"""Whether there is what transformers makes Qwen's processors with; its wheels belong to CUDA builds of torch."""
STEPS = 4
SAVE_STEPS = 2


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        config: What is compiled: a case of the matrix with as many processes and tokens as two cores take.
        rows: Kind of the rows: chat, pair (prompt and completion), text, preference, class, or parquet (chats in a
            Parquet file).
        model: `small`, the cut SmolLM2, or the kind of a tiny model with random weights.
    """

    config: TrainingConfig
    rows: str = "chat"
    model: str = "small"

    @property
    def learning_rate(self) -> float:
        """A rate at which four steps show: adapters start from zero and take a larger one, as do random weights."""
        if self.config.method is not Method.FULL:
            return 5e-3
        return 5e-5 if self.config.task is Task.DPO else 3e-4 if self.model == "small" else 2e-3

    @property
    def adapters(self) -> int:
        """Linears of the model that carry an adapter: seven in each layer of a decoder, six in those of an encoder."""
        return 4 * 7 if self.model == "small" else 2 * 7 if self.rows == "pictures" else 2 * 6


def why_not(config: TrainingConfig, kind: str = "") -> str | None:
    """Returns why a configuration does not train here, most often for want of a GPU; None when it does.

    `kind` is that of a model that reads images.
    """
    if kind in ("qwen2_vl", "qwen2_5_vl") and not TORCHVISION:
        return "its processor needs torchvision, which is not installed"
    places = (config.offload_optimizer, config.offload_param)
    if config.precision is Precision.FP16:
        return (
            "fp16 with loss scaling: accelerate and DeepSpeed refuse fp16 on this device; the script takes another type"
        )
    if config.attention is Attention.FLASH_ATTENTION_2:
        return "FlashAttention has CUDA kernels only; the script takes SDPA"
    if config.checkpoint_offload:
        return "pinned host memory needs CUDA; the script keeps checkpoints where they are"
    if config.context_parallel > 1:
        return "the ring of context parallelism needs an SDPA kernel that returns its log-sum-exp, which only GPUs have"
    if Offload.NVME in places:
        return "DeepSpeed's asynchronous I/O needs libaio and pinned memory"
    if config.optimizer in (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT):
        return "paged states are CUDA unified memory"
    return None


def on_two_cores(config: TrainingConfig) -> TrainingConfig:
    """Returns the configuration with short rows and one or two processes (four where two nodes are the point)."""
    hybrid = config.fsdp is not None and config.fsdp.hybrid
    alone = config.engine is Engine.SINGLE
    return replace(
        config,
        gpus_per_node=1 if alone or (config.nodes == 2 and not hybrid) else 2,
        nodes=1 if alone else config.nodes,
        max_length=128 if config.images_per_sample > 1 else 64,
        gradient_accumulation_steps=1 if config.nodes == 2 else 2,
        eval_batch_size=config.eval_batch_size if config.task in (Task.PRETRAIN, Task.CLASSIFICATION) else 0,
    )


def all_runs() -> dict[str, Run]:
    """Returns every run by name: the cases of the matrix that can, and the kinds of rows."""
    cases = {name: config for name, config in matrix().items() if why_not(config, kind_of(name)) is None}
    rows = {Task.SFT: "chat", Task.PRETRAIN: "text", Task.DPO: "preference", Task.CLASSIFICATION: "class"}
    runs = {}
    for name, config in cases.items():
        kind = kind_of(name) or ("bert" if name.startswith("classes-encoder") else "small")
        runs[name] = Run(on_two_cores(config), "pictures" if kind_of(name) else rows[config.task], kind)
    padded = on_two_cores(make_config(micro_batch_size=2, padding_mask=True, packing=False))
    return runs | {f"rows-{kind}": Run(padded, kind) for kind in ("pair", "text", "parquet")}


def distinct_runs() -> tuple[dict[str, Run], dict[str, str]]:
    """Returns the runs that differ, and by the name of each other one the run that is the same."""
    kept: dict[str, Run] = {}
    same: dict[str, str] = {}
    first: dict[Run, str] = {}
    for name, run in all_runs().items():
        if run in first:
            same[name] = first[run]
        else:
            first[run] = name
            kept[name] = run
    return kept, same


CHOSEN = (
    "single-full-bf16",
    "single-full-bf16_pure",
    "single-lora-bf16",
    "single-qlora-bf16",
    "sft-plain-padded",
    "pretrain-chunked",
    "optimizer-adamw_8bit",
    "every-third-layer",
    "rows-pair",
    "rows-text",
    "ddp-lora-bf16",
    "ddp-qlora-bf16",
    "zero1-full-bf16",
    "zero2-lora-bf16",
    "zero2-offload",
    "zero3-full-bf16",
    "zero3-lora-bf16",
    "fsdp-full-bf16",
    "fsdp-qlora-bf16",
    "fsdp-hybrid",
    "two-nodes-ddp",
    "dpo-single-qlora",
    "dpo-ddp-precomputed",
    "dpo-deepspeed-model",
    "dpo-fsdp-adapters_off",
    "classes-decoder-lora-bf16",
    "classes-encoder-ddp-lora",
    "classes-decoder-zero3-full",
    "classes-encoder-fsdp-full",
    "pictures-llava-ddp-qlora",
    "pictures-gemma3-lora",
    "pictures-gemma3-fsdp-lora",
)
"""Runs of every `make test`, beside the tests of preferences and of encoders; `make matrix ARGS=--all` trains all."""


def _preference(question: str, answer: str) -> dict[str, Any]:
    """Returns a pair that is easy to tell apart: an answer, and the same words in the reverse order."""
    said = {"chosen": answer[:120], "rejected": " ".join(reversed(answer[:120].split()))}
    row: dict[str, Any] = {key: [{"role": "assistant", "content": text}] for key, text in said.items()}
    return {"prompt": [{"role": "user", "content": question[:80]}], **row}


def write_rows(path: Path, kind: str, count: int, *, distinct: int, repeated: int = 1) -> None:
    """Writes `count` rows of a kind: the first `distinct` real instructions, again and again.

    Text of a row can be `repeated`. With few rows every batch holds much the same, so that four steps show a loss that
    falls. Classes alternate: an even number of distinct rows has one class each.
    """
    chats = [json.loads(line)["messages"] for line in DATA.read_text(encoding="utf-8").splitlines()][:distinct]
    chats = [chats[number % len(chats)] for number in range(count)]
    turns = [(chat[-2]["content"], chat[-1]["content"]) for chat in chats]
    rows: list[dict[str, Any]] = {
        "pair": [{"prompt": question, "completion": answer} for question, answer in turns],
        "text": [{"text": f"{question}\n{answer}\n" * repeated} for question, answer in turns],
        "class": [{"text": question, "label": "ab"[number % 2]} for number, (question, _) in enumerate(turns)],
        "preference": [_preference(question, answer) for question, answer in turns],
    }.get(kind) or [{"messages": chat} for chat in chats]
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
