"""One optimizer step of the training loop, as Trainer and SFTTrainer run it, under a tape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from memc.config import Engine, LossHead, Optimizer, Precision, Task, TrainingConfig
from memc.trace.build import build, decoder_layers, place, uses_autocast
from memc.trace.kernels import kernel_buffers
from memc.trace.optional import library
from memc.trace.quantized import quantization_constants
from memc.trace.records import Owner, Stage
from memc.trace.semantics import cuda_semantics
from memc.trace.tape import Tape, recording

_WARM_UP_STEPS = 1
_MAX_GRADIENT_NORM = 1.0
_PAGED_MIN_ELEMENTS = 100_000


def record_steps(
    config: TrainingConfig,
    given: transformers.PretrainedConfig | dict[str, Any],
    layers: int | None,
    *,
    like_cuda: bool = True,
    without_data: bool = True,
) -> Tape:
    """Returns the tape of a warm-up step and one more, with all stages marked."""
    model = build(config, given, layers)
    tape = Tape(kernel_buffers() if like_cuda else None)
    padded = config.padding_mask
    with cuda_semantics(padded=padded, like_cuda=like_cuda, without_data=without_data), recording(tape):
        place(model, config)
        parameters = list(model.parameters())
        tape.claim(parameters, Owner.PARAMETERS)
        tape.claim(quantization_constants(model), Owner.PARAMETERS)
        tape.claim(model.buffers(), Owner.PARAMETERS)
        tape.follow_modules(model, decoder_layers(model))
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        optimizer = _optimizer(config, model, trained)
        batch = _batch(config, model)
        tape.claim(batch.values(), Owner.INPUTS)
        for _ in range(_WARM_UP_STEPS + 1):
            _step(config, model, tape, trained, optimizer, batch)
    return tape


def _optimizer(
    config: TrainingConfig, model: torch.nn.Module, trained: list[torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """Returns the optimizer; None under DeepSpeed, whose states are no tensors of the model's step."""
    if config.engine is Engine.DEEPSPEED:
        return None
    if config.optimizer in (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT):
        return _eight_bit(config, model, trained)
    return torch.optim.AdamW(trained, fused=config.optimizer is Optimizer.ADAMW, foreach=_foreach(config))


def _eight_bit(
    config: TrainingConfig, model: torch.nn.Module, trained: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Returns an 8-bit optimizer that keeps the states of embeddings in 32 bits.

    Source: transformers/trainer.py, create_optimizer.
    """
    optimizer: Any = library("bitsandbytes.optim", "an 8-bit optimizer").AdamW8bit(trained)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    settings_of = optimizer.get_config

    def settings(group_index: int, index: int, group: dict[str, Any]) -> Any:
        found = settings_of(group_index, index, group)
        return {**found, "optim_bits": 32} if id(group["params"][index]) in embeddings else found

    optimizer.get_config = settings
    if config.optimizer is Optimizer.PAGED_ADAMW_8BIT:
        optimizer.get_state_buffer = _paged_state
    result: torch.optim.Optimizer = optimizer
    return result


def _foreach(config: TrainingConfig) -> bool | None:
    return True if config.optimizer is Optimizer.ADAMW_FOREACH else None


def _paged_state(parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a state's buffer; those of large parameters lie in managed memory, outside torch's allocator.

    Source: bitsandbytes/optim/optimizer.py, get_state_buffer.
    """
    outside = parameter.numel() >= _PAGED_MIN_ELEMENTS
    return torch.zeros((0,) if outside else parameter.shape, dtype=dtype)


def _batch(config: TrainingConfig, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    shape = (config.micro_batch_size, config.max_length)
    batch = {"input_ids": torch.ones(shape, dtype=torch.long), "labels": torch.ones(shape, dtype=torch.long)}
    if config.padding_mask:
        batch["attention_mask"] = torch.ones(shape, dtype=torch.long)
    return batch


@contextmanager
def _forward_precision(config: TrainingConfig) -> Iterator[None]:
    half = torch.float16 if config.precision is Precision.FP16 else torch.bfloat16
    with torch.autocast("cpu", dtype=half, enabled=uses_autocast(config)):
        yield


def _loss(config: TrainingConfig, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the loss; what else the model returns dies with this frame, as in Trainer.compute_loss."""
    count = torch.ones((), dtype=torch.long)
    fused = config.loss is LossHead.CHUNKED
    if fused and config.task is Task.SFT:
        with _forward_precision(config):
            outputs = model(**batch, fused_lm_head=True)
        total: torch.Tensor = (-outputs.log_probs).sum()
        return total / count.clamp(min=1)
    switch = {"fused_lm_head": True} if fused else {}
    with _forward_precision(config):
        outputs = model(**batch, **switch, num_items_in_batch=count)
    if uses_autocast(config):
        floats = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        outputs = {name: value.float() if value.is_floating_point() else value for name, value in floats.items()}
    loss: torch.Tensor = outputs["loss"]
    return loss


def _step(
    config: TrainingConfig,
    model: torch.nn.Module,
    tape: Tape,
    trained: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    batch: dict[str, torch.Tensor],
) -> None:
    for _ in range(min(config.gradient_accumulation_steps, 2)):
        tape.enter(Stage.FORWARD)
        loss = _loss(config, model, batch)
        tape.enter(Stage.BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
    tape.claim_gradients(trained)
    tape.enter(Stage.STEP)
    if optimizer is not None:
        torch.nn.utils.clip_grad_norm_(trained, _MAX_GRADIENT_NORM)
        optimizer.step()
        states = (value for state in optimizer.state.values() for value in state.values())
        tape.claim((value for value in states if isinstance(value, torch.Tensor)), Owner.OPTIMIZER_STATES)
    for parameter in trained:
        parameter.grad = None
