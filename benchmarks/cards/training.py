"""A training loop on a real device: the steps that Trainer and SFTTrainer run, phase by phase."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from memc.config import Engine, LossHead, Optimizer, Task, TrainingConfig
from memc.trace.batch import batch_for
from memc.trace.build import uses_autocast
from memc.trace.optional import library
from memc.trace.preference import preference_loss

MAX_GRADIENT_NORM = 1.0


class Training:
    """The loop of one model.

    Args:
        model: With its weights in place.
        config: How it trains.
        mark: Called with the name of each phase when it has been issued.
        reference: The frozen second model of pairs; None without one.
    """

    def __init__(self, model: Any, config: TrainingConfig, mark: Callable[[str], None], reference: Any = None) -> None:
        self.model, self.config, self.mark, self.reference = model, config, mark, reference
        self.device = next(model.parameters()).device
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = None if config.engine is Engine.DEEPSPEED else _optimizer(config, model, self.trained)
        self.batch = _batch(config, model, self.device)
        self._counts_items = _takes_item_count(model)

    def step(self) -> None:
        """Runs one optimizer step."""
        for _ in range(self.config.gradient_accumulation_steps):
            loss = self._loss()
            self.mark("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            self.mark("backward")
        torch.nn.utils.clip_grad_norm_(self.trained, MAX_GRADIENT_NORM)
        assert self.optimizer is not None
        self.optimizer.step()
        for parameter in self.trained:
            parameter.grad = None
        self.mark("step")

    def _loss(self) -> torch.Tensor:
        """Returns the loss of a micro-batch, outputs in fp32 after autocast as accelerate hands them over."""
        if self.config.task is Task.DPO:
            return preference_loss(self.config, self.model, self.reference, self.batch, self._precision)
        count = torch.full((), self.batch["labels"].numel(), device=self.device)
        fused = self.config.loss is LossHead.CHUNKED
        autocast = self._precision(self.config)
        if fused and self.config.task is Task.SFT:
            with autocast:
                outputs = self.model(**self.batch, fused_lm_head=True)
            total: torch.Tensor = -outputs.log_probs.sum()
            return total / count
        switches: dict[str, Any] = {"fused_lm_head": True} if fused else {}
        if self._counts_items:
            switches["num_items_in_batch"] = count
        with autocast:
            outputs = self.model(**self.batch, **switches)
        if uses_autocast(self.config):
            floats = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
            outputs = {name: value.float() if value.is_floating_point() else value for name, value in floats.items()}
        loss: torch.Tensor = outputs["loss"]
        return loss

    def _precision(self, config: TrainingConfig) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=uses_autocast(config))


def training_of(models: tuple[Any, ...], config: TrainingConfig, mark: Callable[[str], None]) -> Training:
    """Returns the loop of a model, of which the second of two is the reference; DeepSpeed's own under DeepSpeed."""
    if config.engine is Engine.DEEPSPEED:
        from cards.offloading import Offloaded

        return Offloaded(models[0], config, mark)
    return Training(models[0], config, mark, *models[1:])


def _batch(config: TrainingConfig, model: Any, device: torch.device) -> dict[str, Any]:
    """Returns a batch of random tokens; a gradient of the embedding has then about as many rows as tokens."""
    batch = dict(batch_for(config, model).tensors)
    rows = model.config.get_text_config().vocab_size
    drawn = torch.randint(rows, batch["input_ids"].shape, generator=torch.Generator().manual_seed(0))
    batch["input_ids"] = drawn
    if config.task is not Task.CLASSIFICATION:
        batch["labels"] = drawn.clone()
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _takes_item_count(model: Any) -> bool:
    """Returns whether Trainer hands the number of labels to the model (transformers/trainer.py, __init__)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(base, "accepts_loss_kwargs"):
        return bool(base.accepts_loss_kwargs)
    parameters = inspect.signature(base.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _optimizer(config: TrainingConfig, model: Any, trained: list[torch.nn.Parameter]) -> Any:
    """Returns the optimizer; 8-bit ones keep the states of embeddings in 32 bits (transformers/trainer.py)."""
    if config.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH):
        fused = config.optimizer is Optimizer.ADAMW
        return torch.optim.AdamW(trained, lr=1e-6, fused=fused, foreach=None if fused else True)
    made = library("bitsandbytes.optim", "an 8-bit or paged optimizer")
    paged = config.optimizer is not Optimizer.ADAMW_8BIT
    bits = 32 if config.optimizer is Optimizer.PAGED_ADAMW else 8
    manager = made.GlobalOptimManager.get_instance()
    for module in model.modules():
        if bits == 8 and isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    return made.AdamW(trained, lr=1e-6, optim_bits=bits, is_paged=paged)
