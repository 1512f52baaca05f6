"""Contradictions within a spec that need no facts to be seen, each with a code of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from memc.config import Method, Task
from memc.spec_engines import ENGINE_CHECKS
from memc.spec_fields import Lora, Spec
from memc.spec_findings import Finding, yaml_text
from memc.spec_tasks import TASK_CHECKS

__all__ = ["Finding", "contradictions"]

LORA_PINS = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "adapter_precision": "precision",
}


def contradictions(spec: Spec) -> list[Finding]:
    """Returns everything in `spec` that cannot hold together."""
    return [finding for check in CHECKS for finding in check(spec)]


def _data_source(spec: Spec) -> Iterator[Finding]:
    if spec.data.train is None and spec.data.samples is None:
        yield Finding(
            code="spec-no-data",
            field="data",
            message="`data` names neither a training file nor a number of samples",
            hint="add `train: data/train.jsonl`, or `samples` when the file is elsewhere",
            also=("data.train", "data.samples", "data.unknown"),
        )


def _mean_tokens(spec: Spec) -> Iterator[Finding]:
    data = spec.data
    cut_into_blocks = spec.task is Task.PRETRAIN and data.packing
    if data.mean_tokens is not None and data.mean_tokens > data.max_length and not cut_into_blocks:
        yield Finding(
            code="spec-mean-above-max-length",
            field="data.mean_tokens",
            message=f"samples of {data.mean_tokens:,} tokens on average do not fit in max_length {data.max_length:,}",
            hint=f"raise `data.max_length`, or write `mean_tokens: {data.max_length}` when longer samples are cut",
            also=("data.max_length", "data.packing", "task"),
        )


def _evaluation(spec: Spec) -> Iterator[Finding]:
    for field, value in (
        ("training.eval_steps", spec.training.eval_steps),
        ("pin.eval_batch_size", spec.pin.eval_batch_size),
    ):
        if value and spec.data.eval is None:
            yield Finding(
                code="spec-evaluation-without-data",
                field=field,
                message=f"`{field}` is {value:,}, but there is no evaluation file",
                hint=f"add `eval: data/eval.jsonl` below `data`, or remove `{field}`",
                also=("data.eval", "data.unknown"),
            )


def _duration(spec: Spec) -> Iterator[Finding]:
    training = spec.training
    if training.epochs is not None and training.max_steps is not None:
        yield Finding(
            code="spec-epochs-and-max-steps",
            field="training.max_steps",
            message=f"`epochs` {training.epochs:g} and `max_steps` {training.max_steps:,} both say how long to train",
            hint="remove one of the two",
            also=("training.epochs",),
        )


def _global_batch(spec: Spec) -> Iterator[Finding]:
    size, pin = spec.training.global_batch_size, spec.pin
    factors = {
        "micro_batch_size": pin.micro_batch_size,
        "gradient_accumulation_steps": pin.gradient_accumulation_steps,
        "GPUs": spec.data_parallel_ranks,
    }
    given = {name: value for name, value in factors.items() if value is not None}
    product = math.prod(given.values())
    exact = len(given) == len(factors)
    if size == product if exact else size % product == 0:
        return
    if spec.data_parallel_ranks != spec.world_size:
        given = {name if name != "GPUs" else "groups of GPUs that share a sequence": given[name] for name in given}
    shown = " x ".join(f"{value} {name}" for name, value in given.items())
    amount = f"{shown} = {product:,}" if len(given) > 1 else shown
    relation = "is not" if exact else "is not a multiple of"
    multiple = product if exact else max(product, round(size / product) * product)
    yield Finding(
        code="spec-global-batch",
        field=_batch_field(spec),
        message=f"`global_batch_size` {size:,} {relation} {amount}",
        hint=f"write `global_batch_size: {multiple}` below `training`, or change the other factors",
        also=(
            "training.global_batch_size",
            "pin.micro_batch_size",
            "pin.gradient_accumulation_steps",
            "hardware.count",
            "hardware.nodes",
            "pin.context_parallel",
        ),
    )


def _batch_field(spec: Spec) -> str:
    """Returns the field to point at when the batch does not divide: the first one that the text sets."""
    if "global_batch_size" in spec.training.model_fields_set:
        return "training.global_batch_size"
    if spec.pin.micro_batch_size is not None:
        return "pin.micro_batch_size"
    return "hardware.count" if spec.pin.gradient_accumulation_steps is None else "pin.gradient_accumulation_steps"


def _lora_without_adapters(spec: Spec) -> Iterator[Finding]:
    if spec.methods != (Method.FULL,):
        return
    names = [f"pin.{name}" for name in LORA_PINS if getattr(spec.pin, name) is not None]
    names += [
        f"lora.{name}" for name in Lora.model_fields if getattr(spec.lora, name) != Lora.model_fields[name].default
    ]
    for name in names:
        yield Finding(
            code="spec-lora-without-adapters",
            field=name,
            message=f"`{name}` is set, but `method` is full, which has no adapters",
            hint="write `method: lora`, or remove the setting",
            also=("method",),
        )


def _lora_twice(spec: Spec) -> Iterator[Finding]:
    for pinned, name in LORA_PINS.items():
        fixed, wished = getattr(spec.pin, pinned), getattr(spec.lora, name)
        if fixed is not None and wished not in (Lora.model_fields[name].default, fixed):
            yield Finding(
                code="spec-pin-contradicts-lora",
                field=f"pin.{pinned}",
                message=f"`pin.{pinned}` is {yaml_text(fixed)}, but `lora.{name}` is {yaml_text(wished)}",
                hint="remove one of the two",
                also=(f"lora.{name}",),
            )


def _quantization(spec: Spec) -> Iterator[Finding]:
    if spec.pin.double_quantization is not None and Method.QLORA not in spec.methods:
        yield Finding(
            code="spec-quantization-without-qlora",
            field="pin.double_quantization",
            message=f"`double_quantization` needs a 4-bit base, but `method` is {', '.join(spec.methods)}",
            hint="write `method: qlora`, or remove `double_quantization`",
            also=("method",),
        )


def _reserve(spec: Spec) -> Iterator[Finding]:
    memory = spec.memory
    if memory.target is not None and memory.reserve is not None:
        yield Finding(
            code="spec-reserve-unused",
            field="memory.reserve",
            message=f"`reserve` counts with `target: auto` only, but `target` is {memory.target.text}",
            hint="remove `reserve`, or write `target: auto`",
            also=("memory.target",),
        )


def _ladder(spec: Spec) -> Iterator[Finding]:
    for position, name in enumerate(spec.ladder.require):
        if name in spec.ladder.forbid:
            yield Finding(
                code="spec-required-and-forbidden",
                field=f"ladder.require.{position}",
                message=f"the technique {name!r} is both required and forbidden",
                hint="remove it from one of the two lists",
                also=("ladder.forbid",),
            )


CHECKS: tuple[Callable[[Spec], Iterator[Finding]], ...] = (
    _data_source,
    _mean_tokens,
    _evaluation,
    _duration,
    *TASK_CHECKS,
    _global_batch,
    *ENGINE_CHECKS,
    _lora_without_adapters,
    _lora_twice,
    _quantization,
    _reserve,
    _ladder,
)
