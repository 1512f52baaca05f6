"""The configurations whose emitted folders are shown to the programs that read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memc.config import (
    AdapterPrecision,
    Attention,
    Engine,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Task,
    TrainingConfig,
)
from memc.render import render
from planmaker import make_config, make_plan, make_run

_CPU = Offload.CPU


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
        cases[f"zero{stage}-pure"] = replace(base, precision=Precision.BF16_PURE)
        cases[f"zero{stage}-8bit"] = replace(base, optimizer=Optimizer.ADAMW_8BIT)
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
        for packing in (True, False):
            name = f"{loss}-{'packed' if packing else 'padded'}"
            cases[f"pretrain-{name}"] = make_config(
                task=Task.PRETRAIN, method=Method.FULL, loss=loss, packing=packing, micro_batch_size=2
            )
            cases[f"sft-{name}"] = make_config(loss=loss, packing=packing, padding_mask=not packing, micro_batch_size=2)
    cases["pretrain-lora-chunked"] = make_config(task=Task.PRETRAIN)
    for optimizer in Optimizer:
        cases[f"optimizer-{optimizer}"] = make_config(optimizer=optimizer)
    cases["flash"] = make_config(attention=Attention.FLASH_ATTENTION_2)
    cases["eager"] = make_config(attention=Attention.EAGER)
    cases["every-third-layer"] = make_config(checkpoint_every=3)
    cases["no-checkpointing"] = make_config(checkpoint_every=0)
    cases["no-evaluation"] = make_config(eval_batch_size=0)
    base = make_config()
    assert base.lora is not None
    cases["base-precision-adapters"] = replace(base, lora=replace(base.lora, precision=AdapterPrecision.BASE))
    return cases


def matrix() -> dict[str, TrainingConfig]:
    """Returns all configurations by name. Each is for one process, so that one process can read them all."""
    return {name: replace(config, gpus_per_node=1) for name, config in (_deepspeed() | _plain()).items()}


def write_matrix(root: Path) -> dict[str, Path]:
    """Writes one folder per configuration and returns them by name."""
    folders = {}
    for name, config in matrix().items():
        folders[name] = root / name
        folders[name].mkdir(parents=True)
        plan = make_plan(config, make_run(eval_data="data/eval.jsonl", eval_steps=50, warmup_ratio=0.03))
        for path, text in render(plan, spec_name="s.yaml", command="memc compile s.yaml -o out/").items():
            (folders[name] / path).write_text(text, encoding="utf-8")
    return folders
