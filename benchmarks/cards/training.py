"""A training loop on a real device: the steps that Trainer and SFTTrainer run, phase by phase."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from memc.config import LossHead, Optimizer, Task, TrainingConfig
from memc.trace.batch import batch_for
from memc.trace.build import uses_autocast
from memc.trace.optional import library

_MAX_GRADIENT_NORM = 1.0


class Training:
    """The loop of one model.

    Args:
        model: With its weights in place.
        config: How it trains.
        mark: Called with the name of each phase when it has been issued.
    """

    def __init__(self, model: Any, config: TrainingConfig, mark: Callable[[str], None]) -> None:
        self.model, self.config, self.mark = model, config, mark
        self.device = next(model.parameters()).device
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = _optimizer(config, model, self.trained)
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
        torch.nn.utils.clip_grad_norm_(self.trained, _MAX_GRADIENT_NORM)
        self.optimizer.step()
        for parameter in self.trained:
            parameter.grad = None
        self.mark("step")

    def _loss(self) -> torch.Tensor:
        """Returns the loss of a micro-batch, outputs in fp32 after autocast as accelerate hands them over."""
        count = torch.full((), self.batch["labels"].numel(), device=self.device)
        fused = self.config.loss is LossHead.CHUNKED
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=uses_autocast(self.config))
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


def _batch(config: TrainingConfig, model: Any, device: torch.device) -> dict[str, Any]:
    """Returns a batch of random tokens; a gradient of the embedding has then about as many rows as tokens."""
    batch = dict(batch_for(config, model).tensors)
    rows = model.config.get_text_config().vocab_size
    drawn = torch.randint(rows, batch["input_ids"].shape, generator=torch.Generator().manual_seed(0))
    batch["input_ids"] = drawn
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
