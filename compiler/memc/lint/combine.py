"""The rules of specs/rules applied to what files state: settings that bite together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any

from memc.lint.context import Context
from memc.lint.records import Kind, Place, Remark, Weight
from memc.lint.values import values_of
from memc.rules import Rule, Severity, broken_rules, message

_WEIGHTS = {Severity.ERROR: Weight.ERROR, Severity.WARNING: Weight.WARNING}
_STATED_UNDER: Mapping[str, tuple[str, ...]] = {
    "method": ("load_in_4bit", "quantization_bit", "adapter", "use_peft", "lora_rank"),
    "precision": ("bf16", "fp16", "mixed_precision"),
    "checkpoint_every": ("activation_checkpointing",),
    "saves": ("save_strategy", "save_steps"),
    "collects_logits": ("trainer",),
    "evaluates": ("eval_strategy", "do_eval", "eval_steps"),
    "offload": ("offload_optimizer", "offload_param"),
    "checkpointing_twice": ("activation_checkpointing", "fsdp_checkpointing"),
    "client_optimizer": ("optimizer",),
    "world_size": ("num_processes", "processes_per_node"),
    "quant_storage_matches": ("quant_storage", "load_in_4bit"),
    "embeddings_whole": ("modules_to_save",),
    "eval_batch_left_out": ("eval_strategy", "do_eval", "eval_steps", "eval_batch_size"),
    "eval_batch_times": ("eval_batch_size",),
    "engine": ("engine", "zero_stage"),
    "offload_param": ("offload_param", "fsdp_offload"),
    "model_type": ("model",),
    "tokens_beyond_positions": ("max_length",),
    "grows_vocabulary": ("grows_vocabulary",),
    "one_tied_table_saved": ("modules_to_save",),
    "embeddings_train": ("adapter",),
    "wraps_by_class": ("wrap_policy",),
    "cadences_differ": ("save_steps", "eval_steps"),
    "device_map_spreads": ("device_map",),
    "computes_in_fp32": ("weights_dtype",),
}
"""Statements that a value is made of, where they have other names than it."""


_TELL_LITTLE = ("evaluates", "saves", "method", "fsdp_version", "zero_stage", "engine")
"""Values that many rules have, which tell little of what is wrong."""


def combination_remarks(context: Context) -> Iterator[Remark]:
    """Yields a remark for each rule that the run's files break."""
    values = values_of(context)
    broken = broken_rules(values, context.plain_versions, (Severity.ERROR, Severity.WARNING), "combinations", "files")
    for rule in broken:
        places = _places(rule, context) or _arguments(context)
        if not places:
            continue
        yield Remark(
            code=rule.code,
            weight=_WEIGHTS[rule.file_severity or rule.severity],
            message=message(rule, _said(rule, values)),
            hint=rule.file_fix or rule.fix,
            place=places[0],
            others=places[1:],
        )


def _arguments(context: Context) -> tuple[Place, ...]:
    """Returns where the arguments of a script begin, for what it says in expressions that only a run can tell."""
    return tuple(document.place() for document in context.statements.of(Kind.ARGUMENTS) if document.extra.get("script"))


def _said(rule: Rule, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a rule's sentence; what nothing states is said to be unset."""
    names = [name for _, name, _, _ in Formatter().parse(rule.sentence) if name]
    return {**dict.fromkeys(names, "unset"), "shard_ranks": "several", **values}


def _places(rule: Rule, context: Context) -> tuple[Place, ...]:
    """Returns where the conditions of a rule are stated, what tells most in front; versions last."""
    found: list[Place] = []
    for test in sorted(rule.when, key=lambda item: _TELL_LITTLE.index(item.name) if item.name in _TELL_LITTLE else -1):
        for name in _STATED_UNDER.get(test.name, (test.name,)):
            stated = context.statements.first(name)
            if stated is not None and stated.place not in found:
                found.append(stated.place)
                break
    for package in rule.versions:
        place = context.versions[package].place if package in context.versions else None
        if place is not None and place not in found:
            found.append(place)
    return tuple(found)
