"""Which rules a configuration breaks, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from memc.config import TrainingConfig
from memc.facts.records import Component, GpuFacts, ModelFacts
from memc.rules.records import Rule, Severity
from memc.rules.table import COMBINATIONS, load_rules

_FP8_BLOCK = 128  # Source: transformers 5.24.0 utils/quantization_config.py FineGrainedFP8Config.weight_block_size


def facts_of(config: TrainingConfig, model: ModelFacts, gpu: GpuFacts) -> dict[str, Any]:
    """Returns the values that rules test, by name: settings in the words of the spec, figures of model and card."""
    experts = sum(
        tensor.params * group.count
        for group in model.groups
        for tensor in group.block.tensors
        if tensor.component is Component.EXPERTS
    )
    fsdp = config.fsdp
    values = {
        "task": config.task,
        "loss": config.loss,
        "method": config.method,
        "reference": config.reference,
        "precision": config.precision,
        "engine": config.engine,
        "optimizer": config.optimizer,
        "zero_stage": config.zero_stage if config.zero is not None else None,
        "hpz_partition": config.zero.hpz_partition if config.zero is not None else None,
        "offload_optimizer": config.offload_optimizer,
        "offload_param": config.offload_param,
        "checkpoint_every": config.checkpoint_every,
        "checkpoint_offload": config.checkpoint_offload,
        "bf16_master_weights": config.zero.bf16_master_weights if config.zero is not None else None,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "world_size": config.world_size,
        "shard_ranks": config.shard_ranks,
        "nodes": config.nodes,
        "replicas": config.world_size // config.shard_ranks,
        "shards_of_a_sequence_group": config.shard_ranks // config.context_parallel,
        "packing": config.packing,
        "attention": config.attention,
        "max_length": config.max_length,
        "tokens_left_over": config.max_length % (2 * config.context_parallel),
        "context_parallel": config.context_parallel,
        "adapter_precision": config.lora.precision if config.lora is not None else None,
        "fsdp_version": fsdp.version if fsdp is not None else None,
        "fsdp_reduces_each_micro_batch": fsdp.reduce_each_micro_batch if fsdp is not None else None,
        "model_type": model.model_type,
        "tiled_loss": model.tiled_loss,
        "fused_expert_params": experts,
        "checkpoint_quantization": model.checkpoint_quantization or None,
        "linears_in_part_blocks": _linears_in_part_blocks(model),
        "gpu_bf16": gpu.bf16,
        "gpu_name": gpu.name,
    }
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


def _linears_in_part_blocks(model: ModelFacts) -> int:
    """Returns the linears of a quantised checkpoint that are larger than a block and no whole number of blocks."""
    if not model.checkpoint_quantization:
        return 0
    sizes = [(linear.in_features, linear.out_features, count) for linear, count in model.linear_modules()]
    return sum(
        count for first, second, count in sizes if any(s > _FP8_BLOCK and s % _FP8_BLOCK for s in (first, second))
    )


def broken_rules(
    values: Mapping[str, Any],
    versions: Mapping[str, str],
    severities: Iterable[Severity] = tuple(Severity),
    *files: str,
) -> tuple[Rule, ...]:
    """Returns the rules whose conditions all hold.

    Args:
        values: What `facts_of` returns, or the same names from files that someone wrote by hand.
        versions: Installed or planned version of each package; a rule about another package's version cannot hold.
        severities: Which kinds to look at.
        files: Files of specs/rules; those on configurations of memc's own without any.
    """
    wanted = frozenset(severities)
    return tuple(
        rule
        for rule in load_rules(*(files or (COMBINATIONS,)))
        if rule.severity in wanted and all(test.holds(values) for test in rule.when) and rule.concerns(versions)
    )


def message(rule: Rule, values: Mapping[str, Any]) -> str:
    """Returns the rule's sentence with the values in it; large counts are written with separators."""
    shown = {name: f"{value:,}" if type(value) is int and value >= 10_000 else value for name, value in values.items()}
    return rule.sentence.format_map(shown)
