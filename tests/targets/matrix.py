"""The configurations whose emitted folders are shown to the programs that read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from memc.config import (
    AdapterPrecision,
    Attention,
    Engine,
    FsdpConfig,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Reference,
    Task,
    TrainingConfig,
)
from planmaker import make_config, make_zero
from specmaker import compile_folder

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ENCODER = "google-bert/bert-base-uncased"
_OF_AN_ENCODER = ("query", "key", "value", "dense")
_CPU, _NVME = Offload.CPU, Offload.NVME
NVME_SETTINGS = {
    "nvme_buffer_elements": 4_000_000,
    "nvme_buffers": 5,
    "nvme_resident_elements": 1_000_000,
    "nvme_state_buffers": 4,
    "nvme_block_bytes": 1 << 20,
    "nvme_queue_depth": 8,
    "nvme_threads": 1,
}


def _deepspeed() -> dict[str, TrainingConfig]:
    """Returns every ZeRO stage x method x precision, and each offload where its stage allows it."""
    cases = {}
    for stage in (0, 1, 2, 3):
        for method in (Method.FULL, Method.LORA):
            for precision in (Precision.BF16, Precision.FP16, Precision.FP32):
                name = f"zero{stage}-{method}-{precision}"
                cases[name] = make_config(engine=Engine.DEEPSPEED, stage=stage, method=method, precision=precision)
    for stage in (1, 2, 3):
        base = make_config(engine=Engine.DEEPSPEED, stage=stage, method=Method.FULL)
        cases[f"zero{stage}-foreach"] = replace(base, optimizer=Optimizer.ADAMW_FOREACH)
        assert base.zero is not None
        cases[f"zero{stage}-offload"] = replace(base, zero=replace(base.zero, offload_optimizer=_CPU))
    cases["zero3-offload-both"] = make_config(
        engine=Engine.DEEPSPEED, stage=3, method=Method.FULL, offload_optimizer=_CPU, offload_param=_CPU
    )
    cases["zero2-qlora"] = make_config(engine=Engine.DEEPSPEED, stage=2, method=Method.QLORA)
    return cases


def _plain() -> dict[str, TrainingConfig]:
    """Returns one process and DistributedDataParallel x method x precision, both tasks, and the single settings."""
    cases = {}
    for engine in (Engine.SINGLE, Engine.DDP):
        for method in Method:
            for precision in Precision:
                cases[f"{engine}-{method}-{precision}"] = make_config(engine=engine, method=method, precision=precision)
    for loss in LossHead:
        cases[f"pretrain-{loss}"] = make_config(task=Task.PRETRAIN, method=Method.FULL, loss=loss, micro_batch_size=2)
        for packing in (True, False):
            cases[f"sft-{loss}-{'packed' if packing else 'padded'}"] = make_config(
                loss=loss, packing=packing, padding_mask=not packing, micro_batch_size=2
            )
    cases["pretrain-lora-chunked"] = make_config(task=Task.PRETRAIN)
    for optimizer in Optimizer:
        cases[f"optimizer-{optimizer}"] = make_config(optimizer=optimizer)
    cases["flash"] = make_config(attention=Attention.FLASH_ATTENTION_2)
    cases["eager"] = make_config(attention=Attention.EAGER)
    cases["checkpoints-on-host"] = make_config(checkpoint_offload=True)
    cases["every-third-layer"] = make_config(checkpoint_every=3)
    cases["no-checkpointing"] = make_config(checkpoint_every=0)
    cases["no-evaluation"] = make_config(eval_batch_size=0)
    base = make_config()
    assert base.lora is not None
    cases["base-precision-adapters"] = replace(base, lora=replace(base.lora, precision=AdapterPrecision.BASE))
    return cases


def _fsdp() -> dict[str, TrainingConfig]:
    """Returns FSDP2 x method x precision on one node, its settings, hybrid sharding and shared sequences."""
    cases = {}
    for method in Method:
        for precision in Precision:
            if (method, precision) != (Method.QLORA, Precision.FP16):
                cases[f"fsdp-{method}-{precision}"] = _spread(1, method=method, precision=precision)
    full: dict[str, Any] = {"method": Method.FULL}
    cases["fsdp-offload"] = _spread(1, fsdp=FsdpConfig(offload=_CPU), **full)
    cases["fsdp-kept-weights"] = _spread(1, fsdp=FsdpConfig(reshard_after_forward=False), **full)
    cases["fsdp-whole-checkpoints"] = _spread(1, fsdp=FsdpConfig(sharded_checkpoints=False), **full)
    cases["fsdp-reduced-once"] = _spread(1, fsdp=FsdpConfig(reduce_each_micro_batch=False), **full)
    cases["fsdp-every-second-layer"] = _spread(1, checkpoint_every=2, **full)
    cases["fsdp-no-checkpointing"] = _spread(1, checkpoint_every=0, **full)
    cases["fsdp-checkpoints-on-host"] = _spread(1, checkpoint_offload=True, **full)
    cases["fsdp-pretrain"] = _spread(1, task=Task.PRETRAIN, **full)
    cases["fsdp-two-nodes"] = _spread(2, **full)
    cases["fsdp-hybrid"] = _spread(2, fsdp=FsdpConfig(hybrid=True), **full)
    cases["fsdp-hybrid-qlora"] = _spread(2, fsdp=FsdpConfig(hybrid=True), method=Method.QLORA)
    cases["context-parallel"] = _spread(1, context_parallel=2, packing=False, **full)
    cases["context-parallel-lora"] = _spread(1, context_parallel=4, packing=False)
    hybrid = FsdpConfig(hybrid=True)
    eight = _spread(2, context_parallel=2, packing=False, fsdp=hybrid, **full)
    cases["context-parallel-hybrid"] = replace(eight, gpus_per_node=4)
    return cases


def _spread(nodes: int, *, engine: Engine = Engine.FSDP, **changes: Any) -> TrainingConfig:
    """Returns a configuration for four processes on one or two nodes."""
    return make_config(engine=engine, gpus_per_node=4 // nodes, nodes=nodes, **changes)


def _several_nodes() -> dict[str, TrainingConfig]:
    """Returns DDP and every ZeRO stage on two nodes, with hybrid sharding and what goes to host and drive."""
    cases = {"two-nodes-ddp": _spread(2, engine=Engine.DDP)}
    cases["ddp-qlora"] = _spread(1, engine=Engine.DDP, method=Method.QLORA)
    for stage in (1, 2, 3):
        cases[f"two-nodes-zero{stage}"] = _spread(2, engine=Engine.DEEPSPEED, stage=stage, method=Method.FULL)
    zero = {
        "zero3-hybrid": make_zero(3, hpz_partition=2),
        "zero3-nvme": make_zero(3, offload_optimizer=_NVME, offload_param=_NVME, **NVME_SETTINGS),
        "zero3-nvme-optimizer": make_zero(3, offload_optimizer=_NVME, **NVME_SETTINGS),
        "zero2-bf16-states": make_zero(2, bf16_master_weights=True, bf16_states=True),
        "zero3-bf16-states": make_zero(3, bf16_master_weights=True, bf16_states=True),
        "zero2-bf16-states-offload": make_zero(2, bf16_master_weights=True, bf16_states=True, offload_optimizer=_CPU),
        "zero2-bf16-masters-offload": make_zero(2, bf16_master_weights=True, offload_optimizer=_CPU),
    }
    for name, settings in zero.items():
        cases[name] = _spread(2, engine=Engine.DEEPSPEED, method=Method.FULL, zero=settings)
    return cases


def matrix() -> dict[str, TrainingConfig]:
    """Returns all configurations by name: those of one process, of four and of eight."""
    alone = {name: replace(config, gpus_per_node=1) for name, config in (_deepspeed() | _plain()).items()}
    return alone | _fsdp() | _several_nodes() | preferences() | classes() | pictures() | schedulers()


def preferences() -> dict[str, TrainingConfig]:
    """Returns preference training on every engine, with every place of the reference, and in other types."""
    model, ahead = Reference.MODEL, Reference.PRECOMPUTED
    wholes = {Engine.SINGLE: (model, ahead), Engine.DDP: (model, ahead), Engine.DEEPSPEED: (model,), Engine.FSDP: ()}
    cases = {}
    for engine, references in wholes.items():
        for reference in (Reference.ADAPTERS_OFF, *references):
            cases[f"dpo-{engine}-{reference}"] = make_config(
                task=Task.DPO,
                engine=engine,
                method=Method.LORA if reference is Reference.ADAPTERS_OFF else Method.FULL,
                reference=reference,
                gpus_per_node=1 if engine is Engine.SINGLE else 4,
                packing=False,
                padding_mask=True,
            )
    pairs: dict[str, Any] = {"task": Task.DPO, "packing": False, "padding_mask": True}
    off: dict[str, Any] = pairs | {"reference": Reference.ADAPTERS_OFF}
    three: dict[str, Any] = {"engine": Engine.DEEPSPEED, "stage": 3}
    whole: dict[str, Any] = pairs | {"method": Method.FULL, "reference": model}
    cases["dpo-zero3-model"] = make_config(**three, **whole)
    cases["dpo-zero3-adapters_off"] = make_config(**three, **off)
    for engine in (Engine.SINGLE, Engine.DDP, Engine.FSDP):
        cases[f"dpo-{engine}-qlora"] = make_config(engine=engine, method=Method.QLORA, **off)
    for precision in (Precision.FP16, Precision.FP32):
        cases[f"dpo-full-{precision}"] = make_config(precision=precision, **whole)
        cases[f"dpo-lora-{precision}"] = make_config(precision=precision, **off)
    return cases


def classes() -> dict[str, TrainingConfig]:
    """Returns sorting into classes by an encoder and by a decoder x method, on every engine and in every type."""
    cases = {}
    for kind in ("encoder", "decoder"):
        for method in (Method.FULL, Method.LORA):
            for precision in (Precision.BF16, Precision.FP16, Precision.FP32):
                cases[f"classes-{kind}-{method}-{precision}"] = _texts(kind, method, precision=precision)
            for engine in (Engine.DDP, Engine.FSDP):
                cases[f"classes-{kind}-{engine}-{method}"] = _texts(kind, method, engine=engine)
            for stage in (2, 3):
                name = f"classes-{kind}-zero{stage}-{method}"
                cases[name] = _texts(kind, method, engine=Engine.DEEPSPEED, stage=stage)
    return cases


def _texts(kind: str, method: Method, **changes: Any) -> TrainingConfig:
    """Returns a configuration that sorts texts of unequal length into two classes."""
    config = make_config(
        task=Task.CLASSIFICATION, method=method, classes=2, packing=False, padding_mask=True, micro_batch_size=2,
        loss=LossHead.PLAIN, **changes,
    )  # fmt: skip
    if kind == "encoder" and config.lora is not None:
        return replace(config, lora=replace(config.lora, target_modules=_OF_AN_ENCODER))
    return config


READERS = {
    "qwen2_vl": "Qwen/Qwen2-VL-2B-Instruct",
    "qwen2_5_vl": "Qwen/Qwen2.5-VL-3B-Instruct",
    "llava": "llava-hf/llava-1.5-7b-hf",
    "gemma3": "google/gemma-3-4b-pt",
}
"""Models that read images, by the kind that cases are named after."""
LAYERS = {
    "qwen2_vl": "Qwen2VLDecoderLayer",
    "qwen2_5_vl": "Qwen2_5_VLDecoderLayer",
    "llava": "LlamaDecoderLayer",
    "gemma3": "Gemma3DecoderLayer",
}


def pictures() -> dict[str, TrainingConfig]:
    """Returns models that read images x method x engine; MAX_LENGTH holds the tokens of the images too."""
    full, lora, qlora = Method.FULL, Method.LORA, Method.QLORA
    three: dict[str, Any] = {"engine": Engine.DEEPSPEED, "stage": 3}
    ddp, fsdp = {"engine": Engine.DDP}, {"engine": Engine.FSDP}
    return {
        "pictures-qwen2_vl-lora": _pictured("qwen2_vl", lora),
        "pictures-qwen2_vl-zero3-full": _pictured("qwen2_vl", full, **three),
        "pictures-qwen2_5_vl-ddp-qlora": _pictured("qwen2_5_vl", qlora, **ddp),
        "pictures-qwen2_5_vl-fsdp-full": _pictured("qwen2_5_vl", full, **fsdp),
        "pictures-llava-qlora": _pictured("llava", qlora, images_per_sample=2),
        "pictures-llava-ddp-qlora": _pictured("llava", qlora, **ddp),
        "pictures-llava-zero3-lora": _pictured("llava", lora, **three),
        "pictures-gemma3-lora": _pictured("gemma3", lora),
        "pictures-gemma3-zero2-qlora": _pictured("gemma3", qlora, engine=Engine.DEEPSPEED),
        "pictures-gemma3-fsdp-lora": _pictured("gemma3", lora, **fsdp),
    }


def _pictured(kind: str, method: Method, **changes: Any) -> TrainingConfig:
    """Returns a configuration with images: for one process, or four where an engine spreads it."""
    attention = Attention.SDPA
    config = make_config(
        method=method, packing=False, padding_mask=True, micro_batch_size=2, max_length=128, attention=attention,
        gpus_per_node=4 if "engine" in changes else 1, **changes,
    )  # fmt: skip
    pixels = 28 * 28 * 64 if kind.startswith("qwen") else config.image_pixels
    tokens = {"llava": 576, "gemma3": 256}.get(kind, 64)
    return replace(config, image_pixels=pixels, max_length=128 + config.images_per_sample * tokens)


def kind_of(name: str) -> str:
    """Returns the kind of model that reads the images of a case; empty for cases of text."""
    return name.split("-")[1] if name.startswith("pictures-") else ""


SCHEDULERS: dict[str, dict[str, Any]] = {
    "slurm": {"scheduler": "slurm", "partition": "gpu", "account": "lab", "time_limit_hours": 12},
    "skypilot": {"scheduler": "skypilot", "accelerator": "RTX4090"},
    "kubernetes": {"scheduler": "kubernetes", "image": "registry/train:1", "volume": "claim"},
}


def schedulers() -> dict[str, TrainingConfig]:
    """Returns two nodes of every engine that runs on several, once for each scheduler."""
    cases = {}
    for scheduler in SCHEDULERS:
        for engine in (Engine.DDP, Engine.DEEPSPEED, Engine.FSDP):
            cases[f"{scheduler}-{engine}"] = _spread(2, engine=engine, method=Method.FULL)
    return cases


def run_settings(name: str) -> dict[str, Any]:
    """Returns the fields of RunSettings that a case of the matrix is compiled with."""
    model = ENCODER if name.startswith("classes-encoder") else READERS.get(kind_of(name), MODEL)
    settings: dict[str, Any] = {"model": model, "train_data": "data/train.jsonl", "save_steps": 100}
    if name != "no-evaluation":
        settings |= {"eval_data": "data/eval.jsonl", "eval_steps": 50}
    return settings | {"warmup_ratio": 0.03} | SCHEDULERS.get(name.rpartition("-")[0], {})


def write_matrix(root: Path) -> dict[str, Path]:
    """Writes one folder per configuration with `memc compile` and returns them by name."""
    cases = matrix().items()
    return {name: compile_folder(root / name, config, certify=False, **run_settings(name)) for name, config in cases}
