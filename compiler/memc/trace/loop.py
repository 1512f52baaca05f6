"""One optimizer step of the training loop, as Trainer and SFTTrainer run it, under a tape."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memc.config import Engine, LossHead, Optimizer, Precision, Task, TrainingConfig
from memc.trace.batch import Batch, batch_for
from memc.trace.build import Given, build, place, uses_autocast
from memc.trace.hosted import checkpoints_on_host
from memc.trace.kernels import kernel_buffers
from memc.trace.optional import library, packages_left_out
from memc.trace.preference import preference_loss, reference_model
from memc.trace.quantized import quantization_constants
from memc.trace.records import H100, Card, Owner, Recording, Stage
from memc.trace.semantics import LikeCuda, cuda_answers, cuda_semantics
from memc.trace.splice import placed, repeated_in_time, whole_depth
from memc.trace.stacks import StackDepth, layer_regions
from memc.trace.tape import Tape, recording
from memc.trace.values import Values

_MAX_GRADIENT_NORM = 1.0
_PAGED_MIN_ELEMENTS = 100_000


@dataclass(frozen=True)
class Run:
    """The record of two optimizer steps at full depth, and how it was made.

    Attributes:
        recording: The record.
        stacks: Every stack of layers, with the depth that was run.
        assumes: What was assumed about the batch.
        packages: Packages with kernels for this model, in whose place torch's own operators ran.
    """

    recording: Recording
    stacks: tuple[StackDepth, ...]
    assumes: tuple[str, ...]
    packages: tuple[str, ...]


def record_steps(
    config: TrainingConfig,
    given: Given,
    *,
    card: Card = H100,
    shallow: bool = True,
    like_cuda: bool = True,
    without_data: bool = True,
    warm_up: bool = False,
) -> Run:
    """Returns the record of a first step and one more, with all stages marked, of a model with all its layers.

    With `shallow`, layers that repeat others are not run but copied in the record, and so is the forward and backward
    of the second step unless `warm_up`. Preference training, which runs every layer twice, is run at its full depth.
    """
    shallow = shallow and config.task is not Task.DPO
    model, stacks = build(config, given, shallow=shallow)
    regions = layer_regions(model)
    tape = _tape(card, like_cuda, without_data)
    fused_head = config.loss is LossHead.CHUNKED
    semantics = cuda_semantics(card, like_cuda=like_cuda, without_data=without_data, fused_head=fused_head)
    with semantics, checkpoints_on_host(tape), recording(tape):
        place(model, config, tape, regions)
        named = dict(model.named_parameters())
        tape.claim(named.values(), Owner.PARAMETERS)
        tape.claim(quantization_constants(model), Owner.PARAMETERS)
        tape.claim(model.buffers(), Owner.PARAMETERS)
        tape.follow_modules(model, regions)
        reference = reference_model(config, given, tape)
        trained = [parameter for parameter in named.values() if parameter.requires_grad]
        optimizer = _optimizer(config, model, trained)
        batch = batch_for(config, model)
        tape.claim((value for value in batch.tensors.values() if isinstance(value, torch.Tensor)), Owner.INPUTS)
        gradients = _step(config, (model, reference), tape, trained, optimizer, batch)
        if warm_up:
            _step(config, (model, reference), tape, trained, optimizer, batch)
            stand_ins = None
        else:
            stand_ins = _optimizer_alone(tape, trained, optimizer, gradients)
    record = placed(tape.recorded())
    if stand_ins is not None:
        record = repeated_in_time(record, gradients, stand_ins)
    for stack in stacks:
        record = whole_depth(record, stack)
    return Run(record, stacks, batch.assumes, packages_left_out(model))


def _tape(card: Card, like_cuda: bool, without_data: bool) -> Tape:
    if not without_data:
        return Tape()
    if like_cuda:
        return Tape(kernel_buffers(card), cuda_answers(), LikeCuda().run)
    return Tape(run=Values().run)


def _optimizer(
    config: TrainingConfig, model: torch.nn.Module, trained: list[torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """Returns the optimizer; None under DeepSpeed, whose states are no tensors of the model's step."""
    if config.engine is Engine.DEEPSPEED:
        return None
    if config.optimizer in (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT, Optimizer.PAGED_ADAMW):
        return _bitsandbytes(config, model, trained)
    return torch.optim.AdamW(trained, fused=config.optimizer is Optimizer.ADAMW, foreach=_foreach(config))


def _bitsandbytes(
    config: TrainingConfig, model: torch.nn.Module, trained: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Returns an 8-bit or paged optimizer; 8-bit ones keep the states of embeddings in 32 bits.

    Source: transformers/trainer.py, create_optimizer.
    """
    made: Any = library("bitsandbytes.optim", "an 8-bit or paged optimizer")
    if config.optimizer is Optimizer.PAGED_ADAMW:
        optimizer = made.AdamW32bit(trained)
    else:
        optimizer = made.AdamW8bit(trained)
        _keep_in_32_bits(optimizer, [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)])
    if config.optimizer is not Optimizer.ADAMW_8BIT:
        optimizer.get_state_buffer = _paged_state
    result: torch.optim.Optimizer = optimizer
    return result


def _keep_in_32_bits(optimizer: Any, weights: list[torch.Tensor]) -> None:
    wide = {id(weight) for weight in weights}
    settings_of = optimizer.get_config

    def settings(group_index: int, index: int, group: dict[str, Any]) -> Any:
        found = settings_of(group_index, index, group)
        return {**found, "optim_bits": 32} if id(group["params"][index]) in wide else found

    optimizer.get_config = settings


def _foreach(config: TrainingConfig) -> bool | None:
    return True if config.optimizer is Optimizer.ADAMW_FOREACH else None


def _paged_state(parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a state's buffer; those of large parameters lie in managed memory, outside torch's allocator.

    Source: bitsandbytes/optim/optimizer.py, get_state_buffer.
    """
    outside = parameter.numel() >= _PAGED_MIN_ELEMENTS
    return torch.zeros((0,) if outside else parameter.shape, dtype=dtype)


@contextmanager
def _forward_precision(config: TrainingConfig) -> Iterator[None]:
    half = torch.float16 if config.precision is Precision.FP16 else torch.bfloat16
    with torch.autocast("cpu", dtype=half, enabled=uses_autocast(config)):
        yield


def _loss(config: TrainingConfig, model: Any, reference: Any, batch: Batch) -> torch.Tensor:
    """Returns the loss; what else the model returns dies with this frame, as in Trainer.compute_loss."""
    if config.task is Task.DPO:
        return preference_loss(config, model, reference, batch.tensors, _forward_precision)
    count = torch.ones((), dtype=torch.long)
    fused = config.loss is LossHead.CHUNKED
    if fused and config.task is Task.SFT:
        with _forward_precision(config):
            outputs = model(**batch.tensors, fused_lm_head=True)
        total: torch.Tensor = (-outputs.log_probs).sum()
        return total / count.clamp(min=1)
    switch: dict[str, Any] = {"fused_lm_head": True} if fused else {}
    if _takes_item_count(model):
        switch["num_items_in_batch"] = count
    with _forward_precision(config):
        outputs = model(**batch.tensors, **switch)
    if uses_autocast(config):
        floats = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        outputs = {name: value.float() if value.is_floating_point() else value for name, value in floats.items()}
    loss: torch.Tensor = outputs["loss"]
    return loss


def _takes_item_count(model: Any) -> bool:
    """Returns whether Trainer hands the number of labels to the model (transformers/trainer.py, __init__)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(base, "accepts_loss_kwargs"):
        return bool(base.accepts_loss_kwargs)
    parameters = inspect.signature(base.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _step(
    config: TrainingConfig,
    models: tuple[torch.nn.Module, Any],
    tape: Tape,
    trained: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    batch: Batch,
) -> list[int | None]:
    """Runs one optimizer step of a model and its reference. Returns the blocks of the gradients."""
    for _ in range(min(config.gradient_accumulation_steps, 2)):
        tape.enter(Stage.FORWARD)
        loss = _loss(config, *models, batch)
        tape.enter(Stage.BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    gradients = tape.claim_gradients(trained)
    _optimize(tape, trained, optimizer)
    return gradients


def _optimizer_alone(
    tape: Tape,
    trained: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    gradients: list[int | None],
) -> list[int | None]:
    """Runs the optimizer once more. Returns the blocks that stand for the gradients of the second step."""
    tape.enter(Stage.STAND_IN)
    for parameter, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            parameter.grad = torch.empty_like(parameter)
    stand_ins = tape.claim_gradients(trained)
    _optimize(tape, trained, optimizer)
    return stand_ins


def _optimize(tape: Tape, trained: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer | None) -> None:
    tape.enter(Stage.STEP)
    if optimizer is not None:
        fused = bool(optimizer.defaults.get("fused"))
        torch.nn.utils.clip_grad_norm_(trained, _MAX_GRADIENT_NORM, foreach=True)
        optimizer.step()
        for parameter, state in optimizer.state.items():
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            if not fused:
                tape.claim([tensors.pop("step", None)], Owner.HOST)
            tape.claim(tensors.values(), Owner.OPTIMIZER_STATES, of=parameter)
    for parameter in trained:
        parameter.grad = None
