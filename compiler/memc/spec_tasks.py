"""Contradictions within a spec between its task and settings that only some tasks have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memc.config import LossHead, Method, Task
from memc.spec_fields import Dpo, Spec
from memc.spec_findings import Finding, yaml_text
from memc.spec_values import PreferenceLoss

_SMOOTHED = (PreferenceLoss.ROBUST, PreferenceLoss.EXO_PAIR, PreferenceLoss.AOT, PreferenceLoss.AOT_UNPAIRED)
_MOST_FLIPPED = 0.5


def _settings_of_other_tasks(spec: Spec) -> Iterator[Finding]:
    """Yields settings of preference training in a spec of another task."""
    if spec.task is Task.DPO:
        return
    names = [f"dpo.{name}" for name, field in Dpo.model_fields.items() if getattr(spec.dpo, name) != field.default]
    names += ["pin.reference"] if spec.pin.reference is not None else []
    for name in names:
        yield Finding(
            code="spec-setting-of-other-task",
            field=name,
            message=f"`{name}` is a setting of preference training, but `task` is {spec.task}",
            hint=f"write `task: dpo`, or remove `{name}`",
            also=("task",),
        )


def _assistant_loss(spec: Spec) -> Iterator[Finding]:
    if not spec.data.assistant_only_loss or spec.task is Task.SFT:
        return
    code, message = {
        Task.PRETRAIN: (
            "spec-assistant-loss-in-pretraining",
            "`assistant_only_loss` needs chat turns, which plain text for pretraining does not have",
        ),
    }.get(
        spec.task,
        ("spec-setting-of-other-task", f"`assistant_only_loss` is a setting of `task: sft`, but `task` is {spec.task}"),
    )
    yield Finding(
        code=code,
        field="data.assistant_only_loss",
        message=message,
        hint="remove `assistant_only_loss`, or write `task: sft`",
        also=("task",),
    )


def _labels(spec: Spec) -> Iterator[Finding]:
    labels = spec.data.labels
    if labels and spec.task is not Task.CLASSIFICATION:
        yield Finding(
            code="spec-setting-of-other-task",
            field="data.labels",
            message=f"`data.labels` is a setting of `task: classification`, but `task` is {spec.task}",
            hint="write `task: classification`, or remove `labels`",
            also=("task",),
        )
    elif len(labels) == 1:
        yield Finding(
            code="spec-one-label",
            field="data.labels",
            message=f"`labels` names only {labels[0]!r}, and texts cannot be sorted into one class",
            hint="name every class, or remove `labels`",
            also=("task",),
        )


def _of_classification(spec: Spec) -> Iterator[Finding]:
    if spec.task is not Task.CLASSIFICATION:
        return
    for name, given, reason in (
        ("data.packing", spec.data.packing, "each text is sorted by itself"),
        ("pin.loss", spec.pin.loss is LossHead.CHUNKED, "there are no logits of a vocabulary to tile"),
    ):
        if given:
            yield Finding(
                code="spec-no-place-in-classification",
                field=name,
                message=f"`{name}` has no place in `task: classification`: {reason}",
                hint=f"remove `{name.partition('.')[2]}`",
                also=("task",),
            )


def _vocabulary(spec: Spec) -> Iterator[Finding]:
    lora = spec.lora
    if lora.new_tokens and lora.modules_to_save:
        yield Finding(
            code="spec-new-tokens-twice",
            field="lora.modules_to_save",
            message="`modules_to_save` trains every row of embedding or head, and with them those of `new_tokens`",
            hint="remove `modules_to_save`: the rows of the new tokens train without it",
            also=("lora.new_tokens",),
        )
    for name in ("new_tokens", "modules_to_save"):
        if getattr(lora, name) and spec.task in (Task.CLASSIFICATION, Task.DPO):
            yield Finding(
                code="spec-vocabulary-of-other-task",
                field=f"lora.{name}",
                message=f"`lora.{name}` goes with tasks sft and pretrain, but `task` is {spec.task}",
                hint=f"remove `{name}`, or train the tokens with task sft first",
                also=("task",),
            )


def _packed_samples(spec: Spec) -> Iterator[Finding]:
    if spec.task is Task.DPO and spec.data.packing:
        yield Finding(
            code="spec-packing-of-pairs",
            field="data.packing",
            message="`packing` joins samples to one sequence, but each answer of a preference pair is scored by itself",
            hint="remove `packing`",
            also=("task",),
        )


def _plain_loss(spec: Spec) -> Iterator[Finding]:
    if spec.task is Task.DPO and spec.pin.loss is LossHead.PLAIN:
        yield Finding(
            code="spec-loss-of-pairs",
            field="pin.loss",
            message="`loss: plain` holds all logits, but TRL's DPOTrainer computes log-probabilities in tiles only",
            hint="write `loss: chunked`, or remove the pin",
            also=("task",),
        )


def _dropout(spec: Spec) -> Iterator[Finding]:
    if spec.task is not Task.DPO:
        return
    for name, value in (("lora.dropout", spec.lora.dropout), ("pin.lora_dropout", spec.pin.lora_dropout)):
        if value:
            yield Finding(
                code="spec-dropout-of-pairs",
                field=name,
                message=f"`{name}` is {value:g}, but preference training runs without dropout: its noise would "
                "be taken for a difference between model and reference",
                hint=f"remove `{name}`",
                also=("task",),
            )


def _reference(spec: Spec) -> Iterator[Finding]:
    if spec.task is Task.DPO and spec.pin.reference is not None and Method.FULL not in spec.methods:
        yield Finding(
            code="spec-reference-with-adapters",
            field="pin.reference",
            message=f"`reference: {yaml_text(spec.pin.reference)}` is about a second model, but with adapters the "
            "model itself is the reference, its adapters switched off",
            hint="remove the pin, or write `method: full`",
            also=("task", "method"),
        )


def _smoothing(spec: Spec) -> Iterator[Finding]:
    if spec.task is not Task.DPO:
        return
    loss, smoothing = spec.dpo.loss, spec.dpo.label_smoothing
    problem = ""
    if smoothing and loss not in _SMOOTHED:
        problem = f"`label_smoothing` is {smoothing:g}, which the loss {loss} does not read"
        hint = f"remove it, or write one of the losses {', '.join(_SMOOTHED)}"
    elif loss is PreferenceLoss.EXO_PAIR and not smoothing:
        problem, hint = (
            "the loss exo_pair takes the logarithm of `label_smoothing`, which is 0",
            "write for example 0.001",
        )
    elif loss is PreferenceLoss.ROBUST and smoothing >= _MOST_FLIPPED:
        problem = f"`label_smoothing` is {smoothing:g}: the loss robust divides by 1 - 2 x label_smoothing"
        hint = "write a value below 0.5"
    if problem:
        yield Finding(
            code="spec-label-smoothing",
            field="dpo.label_smoothing",
            message=problem,
            hint=hint,
            also=("dpo.loss", "task"),
        )


TASK_CHECKS: tuple[Callable[[Spec], Iterator[Finding]], ...] = (
    _settings_of_other_tasks,
    _assistant_loss,
    _labels,
    _vocabulary,
    _of_classification,
    _packed_samples,
    _plain_loss,
    _dropout,
    _reference,
    _smoothing,
)
