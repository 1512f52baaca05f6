"""A training loop under DeepSpeed on one device, its optimizer on the host: what accelerate and Trainer make of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from memc.config import Optimizer, TrainingConfig
from memc.trace.optional import library

from cards.training import MAX_GRADIENT_NORM, Training


class Offloaded(Training):
    """The loop of one model whose optimizer and masters DeepSpeed keeps on the host."""

    def __init__(self, model: Any, config: TrainingConfig, mark: Callable[[str], None]) -> None:
        super().__init__(model, config, mark)
        deepspeed = library("deepspeed", "an optimizer on the host")
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
        os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})
        deepspeed.init_distributed(dist_backend="nccl" if self.device.type == "cuda" else "gloo")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=self.trained, config=engine_document(config))
        self.engine = self.model = engine

    def step(self) -> None:
        """Runs one optimizer step."""
        for _ in range(self.config.gradient_accumulation_steps):
            loss = self._loss()
            self.mark("forward")
            self.engine.backward(loss)
            del loss
            self.mark("backward")
            self.engine.step()
        self.mark("step")


def engine_document(config: TrainingConfig) -> dict[str, Any]:
    """Returns what ds_config.json says of such a plan, with what Trainer fills in.

    Source: `memc.render.documents.ds_config`.
    """
    zero = config.zero
    assert zero is not None
    assert config.optimizer is Optimizer.ADAMW
    sharding: dict[str, Any] = {
        "stage": zero.stage,
        "reduce_bucket_size": zero.reduce_bucket_elements,
        "overlap_comm": zero.overlap_comm,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "offload_optimizer": {"device": zero.offload_optimizer.value, "pin_memory": torch.cuda.is_available()},
    }
    if zero.stage == 3:
        sharding |= {
            "sub_group_size": zero.sub_group_elements,
            "stage3_prefetch_bucket_size": zero.prefetch_elements,
            "stage3_param_persistence_threshold": zero.persistence_elements,
            "stage3_max_live_parameters": zero.max_live_elements,
            "stage3_max_reuse_distance": zero.max_live_elements,
        }
    else:
        sharding |= {"allgather_partitions": True, "allgather_bucket_size": zero.allgather_bucket_elements}
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": MAX_GRADIENT_NORM,
        "data_types": {"grad_accum_dtype": "bf16"},
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": True,
        "zero_optimization": sharding,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
    }
