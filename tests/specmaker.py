"""Specs that pin every choice of a configuration, and the folders that memc compiles from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from memc.cli import app
from memc.config import Reference, TrainingConfig
from memc.document import settings_document
from memc.facts.models import load_model
from memc.facts.records import Objective
from memc.ledger.image_shapes import image_stack, image_tokens
from memc.plan import RunSettings
from planmaker import make_run


class NotCompiledError(AssertionError):
    """memc refused the spec; the message is what it said."""


def compile_folder(out: Path, config: TrainingConfig, *, certify: bool = True, **run: Any) -> Path:
    """Returns `out`, written by `memc compile` from a spec that pins every choice of `config`.

    `run` are fields of RunSettings. The spec stands beside the folder. The command runs in this process. Without
    `certify` the plan is not traced, which changes no file but the lock.

    Raises:
        NotCompiledError: memc refuses the spec.
        AssertionError: What was compiled is not `config`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    spec = out.with_name(out.name + ".yaml")
    spec.write_text(yaml.safe_dump(spec_fields(config, make_run(**run)), sort_keys=False), encoding="utf-8")
    command = ["compile", str(spec), "-o", str(out), *([] if certify else ["--no-certify"])]
    done = CliRunner().invoke(app, command, standalone_mode=False)
    if done.exception is not None:
        raise NotCompiledError(str(done.exception)) from done.exception
    if done.return_value not in (None, 0) or not (out / "memc.lock").is_file():
        raise NotCompiledError(done.output)
    settings = json.loads((out / "memc.lock").read_text(encoding="utf-8"))["plan"]["settings"]
    asked = json.loads(json.dumps(settings_document(config)))
    loose = ("lora", "zero", "fsdp")  # hold settings that a spec pins only where they matter
    other = {key: settings[key] for key in asked if key not in loose and settings[key] != asked[key]}
    assert not other, f"{out.name}: compiled to {other}, asked for { ({key: asked[key] for key in other}) }"
    return out


def spec_fields(config: TrainingConfig, run: RunSettings) -> dict[str, Any]:
    """Returns a spec that leaves the solver no choice but `config`."""
    pin: dict[str, Any] = {
        "engine": config.engine.value,
        "micro_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "activation_checkpointing": config.checkpoint_every,
        "attention": config.attention.value,
        "loss": config.loss.value,
        "optimizer": config.optimizer.value,
        "precision": config.precision.value,
        "checkpoint_offload": config.checkpoint_offload,
        "padding_mask": config.padding_mask,
    }
    if config.reference in (Reference.MODEL, Reference.PRECOMPUTED):
        pin["reference"] = config.reference.value
    if config.context_parallel > 1:
        pin["context_parallel"] = config.context_parallel
    if run.eval_data and config.eval_batch_size:
        pin["eval_batch_size"] = config.eval_batch_size
    if config.zero is not None:
        zero = config.zero
        pin |= {
            "zero_stage": zero.stage,
            "offload_optimizer": zero.offload_optimizer.value,
            "overlap_comm": zero.overlap_comm,
            "reduce_bucket_size": zero.reduce_bucket_elements,
            "bf16_master_weights": zero.bf16_master_weights,
            "bf16_optimizer_states": zero.bf16_states,
        }
        if zero.stage in (1, 2):
            pin["allgather_bucket_size"] = zero.allgather_bucket_elements
        if zero.stage == 3:
            pin |= {
                "prefetch_bucket_size": zero.prefetch_elements,
                "param_persistence_threshold": zero.persistence_elements,
                "max_live_parameters": zero.max_live_elements,
                "sub_group_size": zero.sub_group_elements,
                "offload_param": zero.offload_param.value,
                "hybrid_sharding": zero.hpz_partition > 1,
            }
    if config.fsdp is not None:
        fsdp = config.fsdp
        pin |= {
            "reshard_after_forward": fsdp.reshard_after_forward,
            "reduce_each_micro_batch": fsdp.reduce_each_micro_batch,
            "sharded_checkpoints": fsdp.sharded_checkpoints,
            "offload_param": fsdp.offload.value,
            "hybrid_sharding": fsdp.hybrid,
        }
    data = {"train": run.train_data, "max_length": config.max_length, "packing": config.packing}
    data |= _images(config, run.model)
    if run.eval_data:
        data["eval"] = run.eval_data
    spec: dict[str, Any] = {
        "model": run.model,
        "task": config.task.value,
        "method": config.method.value,
        "data": data,
        "training": {
            "max_steps": run.max_steps,
            "global_batch_size": config.global_batch_size,
            "learning_rate": run.learning_rate,
            "warmup_ratio": run.warmup_ratio,
            "lr_scheduler": run.lr_scheduler,
            "save_steps": run.save_steps,
            "logging_steps": run.logging_steps,
            "output_dir": run.output_dir,
        },
        "hardware": {
            "gpu": "rtx-4090",
            "count": config.gpus_per_node,
            "nodes": config.nodes,
            "host_memory": "64GiB",
            "nvme": "200GB",
            "nvme_path": run.nvme_path,
        },
        "pin": pin,
    }
    if not run.max_steps:
        spec["training"].pop("max_steps")
        spec["training"]["epochs"] = run.epochs
    if run.eval_data:
        spec["training"]["eval_steps"] = run.eval_steps
    if config.lora is not None:
        lora = config.lora
        spec["lora"] = {"rank": lora.rank, "alpha": lora.alpha, "precision": lora.precision.value}
    if run.scheduler != "none":
        spec["launch"] = {"scheduler": run.scheduler} | {
            name: value
            for name, value in {
                "time_limit": run.time_limit_hours,
                "partition": run.partition,
                "account": run.account,
                "image": run.image,
                "volume": run.volume,
                "accelerator": run.accelerator,
            }.items()
            if value
        }
    return spec


def _images(config: TrainingConfig, name: str) -> dict[str, int]:
    """Returns what a spec says of images where a model reads some; their tokens come on top of its `max_length`."""
    model = load_model(name, base_dir=Path())
    if model.objective is not Objective.IMAGE_TEXT_LM:
        return {}
    tokens = config.images_per_sample * image_tokens(model, config)
    said = {"images_per_sample": config.images_per_sample, "max_length": config.max_length - tokens}
    stack = image_stack(model)
    assert stack is not None
    return said if stack.patches is None else {**said, "image_pixels": config.image_pixels}
