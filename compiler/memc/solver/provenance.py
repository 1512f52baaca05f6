"""Why each generated key has its value, and which facts a plan rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from memc.config import Engine, LossHead, Method, Optimizer, Task, TrainingConfig
from memc.facts import AttentionFacts, Block, Fact, GpuFacts, MlpFacts, ModelFacts, load_fact
from memc.ladder import Dimension, Technique
from memc.plan import Provenance
from memc.solver.frames import Candidate
from memc.solver.resolve import Question
from memc.solver.search import Machine

_KEYS: dict[Dimension, tuple[tuple[str, str], ...]] = {
    Dimension.METHOD: (("peft_config.json", "r"), ("peft_config.json", "target_modules"), ("train.py", "METHOD")),
    Dimension.STATES: (("train.py", "optim"),),
    Dimension.SHARDING: (
        ("ds_config.json", "zero_optimization.stage"),
        ("accelerate.yaml", "deepspeed_config.deepspeed_config_file"),
    ),
    Dimension.OFFLOAD_OPTIMIZER: (("ds_config.json", "zero_optimization.offload_optimizer.device"),),
    Dimension.OFFLOAD_PARAM: (("ds_config.json", "zero_optimization.offload_param.device"),),
    Dimension.ENGINE_STATES: (
        ("ds_config.json", "bf16.bf16_master_weights_and_grads"),
        ("ds_config.json", "bf16.bf16_optimizer_states"),
    ),
    Dimension.ADAPTERS: (("train.py", "ADAPTER_DTYPE"),),
    Dimension.PRODUCTS: (),
    Dimension.CONTEXT: (("train.py", "CONTEXT_PARALLEL"),),
    Dimension.CHECKPOINT_OFFLOAD: (("train.py", "CHECKPOINT_OFFLOAD"),),
    Dimension.LOSS: (("train.py", "LOSS"),),
    Dimension.REFERENCE: (("train.py", "PRECOMPUTE_REFERENCE"),),
    Dimension.CHECKPOINTING: (("train.py", "activation_checkpointing"),),
    Dimension.MICRO_BATCH: (
        ("train.py", "per_device_train_batch_size"),
        ("train.py", "gradient_accumulation_steps"),
    ),
}
_FSDP_KEYS: dict[Dimension, tuple[tuple[str, str], ...]] = {
    Dimension.SHARDING: (("accelerate.yaml", "fsdp_config"),),
    Dimension.OFFLOAD_PARAM: (("accelerate.yaml", "fsdp_config.fsdp_offload_params"),),
}


def provenance(machine: Machine, chosen: Candidate) -> tuple[Provenance, ...]:
    """Returns one record per key that a technique set, with what the plan would need more without that technique."""
    names = frozenset(technique.name for technique in chosen.techniques)
    records = []
    for technique in chosen.techniques:
        without = machine.space().find(names - {technique.name})
        saved = without.price.gpu_required_bytes - chosen.price.gpu_required_bytes if without is not None else 0
        keys = technique_keys(technique, chosen.config)
        records += [_record(machine, technique, file, key, saved) for file, key in keys]
    return tuple(sorted(records, key=lambda record: (record.rung, record.file, record.key)))


def technique_keys(technique: Technique, config: TrainingConfig) -> tuple[tuple[str, str], ...]:
    """Returns the files and keys that a technique set."""
    if config.engine is Engine.FSDP and technique.dimension in _FSDP_KEYS:
        return _FSDP_KEYS[technique.dimension]
    return _KEYS[technique.dimension]


def _record(machine: Machine, technique: Technique, file: str, key: str, saved: int) -> Provenance:
    return Provenance(
        file=file,
        key=key,
        rung=machine.rungs[technique.name],
        technique=technique.name,
        account=technique.accounts[0].value,
        bytes_saved=max(0, saved),
    )


def used_facts(question: Question, config: TrainingConfig, read: Mapping[str, Fact]) -> dict[str, str]:
    """Returns the facts that a plan rests on, by key, for the lock; sorted.

    Args:
        question: What was asked: its card and its model.
        config: The chosen configuration, which decides what libraries the folder needs.
        read: The library and link facts that were read on the way.
    """
    model, gpu = question.model, question.gpu
    found = {key: fact.value for key, fact in read.items()}
    named = question.loaded.spec.libraries.named
    found |= {f"stack.{name}": named.get(name) or load_fact(f"stack.{name}").value for name in _libraries(config)}
    found |= _figures(f"gpus.{gpu.key}", gpu)
    found |= _figures(f"models.{model.key}", model) | {f"models.{model.key}.params": model.total_params}
    blocks = Counter[Block]()
    for group in model.groups:
        blocks[group.block] += group.count
    for index, (block, count) in enumerate(blocks.items()):
        found |= _block_figures(f"models.{model.key}.blocks.{index}", block, count)
    if question.samples is not None and question.loaded.spec.data.samples != question.given_samples:
        found["data.samples"] = question.samples
    return {key: str(found[key]) for key in sorted(found)}


def _libraries(config: TrainingConfig) -> list[str]:
    """Returns the libraries with a known-good version that a run of this configuration loads."""
    eight_bit = config.optimizer in (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)
    needed = {
        "trl": config.task in (Task.SFT, Task.DPO) or config.loss is LossHead.CHUNKED,
        "peft": config.lora is not None,
        "bitsandbytes": config.method is Method.QLORA or eight_bit,
        "deepspeed": config.engine is Engine.DEEPSPEED,
    }
    return ["torch", "transformers", "accelerate", "datasets", *(name for name, on in needed.items() if on)]


def _figures(prefix: str, record: GpuFacts | ModelFacts | AttentionFacts | MlpFacts) -> dict[str, Any]:
    """Returns the figures and switches of a record by dotted key; nested records and what only describes are left."""
    found: dict[str, Any] = {}
    for item in fields(record):
        value = getattr(record, item.name)
        if isinstance(value, dict):
            found |= {f"{prefix}.{item.name}.{key}": figure for key, figure in value.items()}
        elif item.name in ("compute_capability", "model_type", "checked") or _is_figure(value):
            found[f"{prefix}.{item.name}"] = value
    return found


def _is_figure(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float)


def _block_figures(prefix: str, block: Block, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {f"{prefix}.count": count}
    found |= _figures(f"{prefix}.attention", block.attention) | _figures(f"{prefix}.mlp", block.mlp)
    found[f"{prefix}.mlp.activation"] = block.mlp.activation
    for linear in block.linears:
        bias = " + bias" if linear.bias else ""
        found[f"{prefix}.linears.{linear.name}"] = f"{linear.in_features} x {linear.out_features}{bias}"
    found |= {f"{prefix}.norms.{norm.name}": f"{norm.kind} {norm.size} x {norm.rows}" for norm in block.norms}
    return found | {f"{prefix}.tensors.{tensor.name}": tensor.params for tensor in block.tensors}
