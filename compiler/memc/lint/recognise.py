"""What a parsed JSON or YAML document is written for, by its keys, and the documents inside of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memc.lint.records import Document, Kind, words
from memc.spec_source import Node

_ARGUMENTS = words(
    "learning_rate per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_train_epochs "
    "warmup_ratio warmup_steps lr_scheduler_type weight_decay save_steps save_strategy eval_strategy "
    "evaluation_strategy logging_steps max_steps max_seq_length output_dir gradient_checkpointing "
    "activation_checkpointing bf16 fp16 tf32 optim max_grad_norm group_by_length overwrite_output_dir eval_steps "
    "per_gpu_train_batch_size save_total_limit logging_strategy report_to adam_beta2 max_length packing "
    "gradient_checkpointing_kwargs ddp_find_unused_parameters remove_unused_columns "
    "load_best_model_at_end"
)
_TELLING = words(
    "per_device_train_batch_size per_device_eval_batch_size evaluation_strategy num_train_epochs lr_scheduler_type "
    "gradient_accumulation_steps max_seq_length per_gpu_train_batch_size overwrite_output_dir group_by_length"
)
_AXOLOTL = words("sequence_len sample_packing micro_batch_size adapter datasets num_epochs lora_r")
_FACTORY = words("finetuning_type cutoff_len dataset_dir")
_FSDP = words(
    "transformer_layer_cls_to_wrap auto_wrap_policy sharding_strategy reshard_after_forward use_orig_params "
    "sync_module_states cpu_ram_efficient_loading min_num_params backward_prefetch state_dict_type "
    "xla_fsdp_settings"
)
_DEEPSPEED_SIDE = words("fp16 bf16 optimizer scheduler gradient_clipping steps_per_print aio zero_optimization")
_ACCELERATE = words(
    "mixed_precision num_processes num_machines machine_rank main_process_ip main_process_port deepspeed_config "
    "fsdp_config rdzv_backend same_network use_cpu main_training_function downcast_bf16 dynamo_config"
)
_OWN = (words("hardware data"), words("source checked"))
"""Keys of a spec and of a fact file of memc's own, which other commands read."""
_SECTIONS = ("training_args", "training_arguments", "train_args", "trainer", "training", "train", "args", "sft", "dpo")
_EMBEDDED: Mapping[str, Kind] = {
    "deepspeed": Kind.DEEPSPEED,
    "fsdp_config": Kind.FSDP,
    "peft_config": Kind.ADAPTER,
    "lora_config": Kind.ADAPTER,
    "lora": Kind.ADAPTER,
    "quantization_config": Kind.QUANTIZATION,
    "bnb_config": Kind.QUANTIZATION,
    "training_args": Kind.ARGUMENTS,
    "training_arguments": Kind.ARGUMENTS,
    "train_args": Kind.ARGUMENTS,
}
WORDS = (
    b"zero_optimization",
    b"train_micro_batch",
    b"train_batch_size",
    b"distributed_type",
    b"compute_environment",
    b"deepspeed_config",
    b"fsdp_",
    b"lora_alpha",
    b"peft_type",
    b"model_type",
    b"learning_rate",
    b"_strategy",
    b"gradient_accumulation_steps",
    b"load_in_4bit",
    b"load_in_8bit",
    b"base_model",
    b"finetuning_type",
    b"num_train_epochs",
    b"warmup_",
    b"max_seq_length",
    b"transformer_layer_cls",
    b"mixed_precision",
    b"lora_r",
    b"save_steps",
    b"gradient_checkpointing",
    b"output_dir",
    b"auto_wrap_policy",
    b"num_processes",
    b"num_machines",
    b"weight_decay",
    b"activation_checkpointing",
    b"use_reentrant",
)
"""One of these stands in every JSON or YAML that is recognised: others are passed over unread."""


def recognised(path: Path, root: Node) -> tuple[Document, ...]:
    """Returns the document that a file holds and those inside of it; nothing when nobody known reads it."""
    kind, dialect = _kind(root)
    if kind is None:
        return tuple(_sections(path, root))
    document = Document(kind=kind, path=path, node=root, dialect=dialect, names=tuple(_names(root)))
    return (document, *_inside(document))


def _kind(root: Node) -> tuple[Kind | None, str]:
    keys = frozenset(root.keys)
    plain = frozenset(key.removeprefix("fsdp_") for key in keys)
    if not keys or _OWN[0] <= keys or _OWN[1] <= keys:
        return None, ""
    if (
        "distributed_type" in keys
        or "compute_environment" in keys
        or len(keys & _ACCELERATE) >= 3
        or keys <= _ACCELERATE
    ):
        return Kind.ACCELERATE, ""
    arguments = len(keys & _ARGUMENTS) >= 2 and (bool(keys & _TELLING) or len(keys & _ARGUMENTS) >= 3)
    arguments = arguments or keys <= _ARGUMENTS
    if "finetuning_type" in keys or len(keys & _FACTORY) >= 2:
        return Kind.ARGUMENTS, "llama-factory"
    if "base_model" in keys and keys & _AXOLOTL:
        return Kind.ARGUMENTS, "axolotl"
    if _is_deepspeed(keys) and not keys & _TELLING - {"gradient_accumulation_steps"}:
        return Kind.DEEPSPEED, ""
    if "peft_type" in keys or (
        "lora_alpha" in keys and keys & {"r", "target_modules", "lora_dropout"} and not arguments
    ):
        return Kind.ADAPTER, ""
    if arguments:
        return Kind.ARGUMENTS, _dialect(keys)
    if "model_type" in keys and keys & {
        "architectures",
        "hidden_size",
        "d_model",
        "n_embd",
        "text_config",
        "vocab_size",
    }:
        return Kind.MODEL, ""
    if len(plain & _FSDP) >= 2 or (plain & _FSDP and plain != keys):
        return Kind.FSDP, ""
    if keys & {"load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"}:
        return Kind.QUANTIZATION, ""
    return None, ""


def _is_deepspeed(keys: frozenset[str]) -> bool:
    if "zero_optimization" in keys or "train_micro_batch_size_per_gpu" in keys:
        return True
    return "train_batch_size" in keys and bool(keys & _DEEPSPEED_SIDE)


def _dialect(keys: frozenset[str]) -> str:
    """Returns the task of a TRL command whose YAML this is; empty for plain arguments."""
    if keys & {"beta", "loss_weights", "precompute_ref_log_probs", "max_prompt_length", "rpo_alpha"}:
        return "grpo" if keys & {"num_generations", "max_completion_length"} and "beta" not in keys else "dpo"
    if keys & {"num_generations", "reward_funcs"}:
        return "grpo"
    telling = {"packing", "dataset_text_field", "max_seq_length", "assistant_only_loss", "completion_only_loss"}
    return "sft" if keys & {*telling, "dataset_kwargs", "eos_token", "neftune_noise_alpha"} else ""


def _sections(path: Path, root: Node) -> Iterator[Document]:
    """Yields the documents that sections of an unknown file hold (one of arguments in a file of several things)."""
    if _OWN[0] <= frozenset(root.keys) or _OWN[1] <= frozenset(root.keys):
        return
    for name, (_, inner) in root.keys.items():
        kind, dialect = _kind(inner)
        if kind is None:
            continue
        if kind is Kind.ARGUMENTS and name not in _SECTIONS:
            dialect = dialect or "section"
        document = Document(kind=kind, path=path, node=inner, dialect=dialect, names=tuple(_names(inner)))
        yield document
        yield from _inside(document)


def _inside(owner: Document) -> Iterator[Document]:
    """Yields the documents that stand inside of one."""
    for name, (_, inner) in owner.node.keys.items():
        if not inner.keys:
            continue
        kind = _EMBEDDED.get(name)
        if kind is None or (owner.kind is Kind.MODEL and kind is not Kind.QUANTIZATION):
            continue
        dialect = "accelerate" if owner.kind is Kind.ACCELERATE else ""
        yield Document(
            kind=kind,
            path=owner.path,
            node=inner,
            dialect=dialect,
            owner=owner,
            names=tuple(_names(inner)),
            extra={"section": name},
        )


def _names(node: Node) -> Iterator[str]:
    """Yields the files that a document names."""
    for steps in (
        ("deepspeed",),
        ("fsdp_config",),
        ("deepspeed_config", "deepspeed_config_file"),
        ("deepspeed_config_file",),
        ("config_file",),
    ):
        value: Any = node
        for step in steps:
            value = value.keys[step][1] if isinstance(value, Node) and step in value.keys else None
        if isinstance(value, Node) and isinstance(value.value, str) and value.value not in ("", "none", "null"):
            yield value.value
