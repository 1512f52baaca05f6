"""Configurations and models that the trace's tests share."""

from __future__ import annotations

from typing import Any

from memc.config import (
    AdapterPrecision,
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

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config(
    *,
    method: str = "full",
    precision: str = "bf16",
    engine: str = "single",
    task: str = "pretrain",
    batch: int = 1,
    length: int = 128,
    accumulation: int = 1,
    mask: bool = False,
    attention: str = "sdpa",
    checkpoint_every: int = 0,
    hosted: bool = False,
    optimizer: str = "adamw_torch_fused",
    rank: int = 16,
    dropout: float = 0.0,
    targets: tuple[str, ...] = ALL_LINEAR,
    adapters: str = "fp32",
) -> TrainingConfig:
    """Returns a configuration of one GPU."""
    lora = LoraConfig(
        rank=rank, alpha=rank, dropout=dropout, target_modules=targets, precision=AdapterPrecision(adapters)
    )
    return TrainingConfig(
        task=Task(task),
        method=Method(method),
        precision=Precision(precision),
        engine=Engine(engine),
        gpus_per_node=1,
        nodes=1,
        micro_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_length=length,
        packing=False,
        padding_mask=mask,
        attention=Attention(attention),
        loss=LossHead.CHUNKED if task == "sft" else LossHead.PLAIN,
        checkpoint_every=checkpoint_every,
        checkpoint_offload=hosted,
        optimizer=Optimizer(optimizer),
        lora=None if method == "full" else lora,
        zero=None,
        eval_batch_size=0,
    )


def llama(**changes: Any) -> dict[str, Any]:
    """Returns the fields of a small Llama config."""
    fields: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 1003,
        "hidden_size": 672,
        "intermediate_size": 1600,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 96,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return {**fields, **changes}


def tiny(**changes: Any) -> dict[str, Any]:
    """Returns the fields of a Llama config that real tensors can train in no time."""
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 16}
    return llama(**{"num_hidden_layers": 2, **sizes, **changes})
