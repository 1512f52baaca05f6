"""The ledger against figures measured on the real modelling code, case by case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from memc.config import (
    AdapterPrecision,
    Attention,
    Engine,
    LoraConfig,
    LossHead,
    Method,
    Optimizer,
    Precision,
    Task,
    TrainingConfig,
    ZeroConfig,
)
from memc.facts import default_lora_targets, load_gpu, load_model
from memc.ledger import Estimator, Moment, ledger_facts
from memc.ledger.activations import layer_groups
from memc.ledger.layer import layer_mode, saved_tensors

HERE = Path(__file__).parent / "ledger"
ZERO = ZeroConfig(
    stage=2,
    reduce_bucket_elements=500_000_000,
    allgather_bucket_elements=500_000_000,
    prefetch_elements=50_000_000,
    persistence_elements=100_000,
    max_live_elements=1_000_000_000,
    sub_group_elements=1_000_000_000,
    overlap_comm=False,
)
BASE = TrainingConfig(
    task=Task.PRETRAIN,
    method=Method.FULL,
    precision=Precision.BF16,
    engine=Engine.SINGLE,
    gpus_per_node=1,
    nodes=1,
    micro_batch_size=1,
    gradient_accumulation_steps=1,
    max_length=2048,
    packing=True,
    padding_mask=False,
    attention=Attention.SDPA,
    loss=LossHead.PLAIN,
    checkpoint_every=0,
    optimizer=Optimizer.ADAMW,
    lora=None,
    zero=None,
    eval_batch_size=0,
)


def cases(name: str) -> list[Any]:
    document = yaml.safe_load((HERE / name).read_text(encoding="utf-8"))
    return [pytest.param(case, id=case["name"]) for case in document["cases"]]


def configuration(case: dict[str, Any]) -> TrainingConfig:
    """Returns the configuration that a case describes."""
    model = load_model(case["model"], base_dir=Path())
    method = Method(case.get("method", "full"))
    lora = None
    if method is not Method.FULL:
        lora = LoraConfig(
            rank=case.get("rank", 16),
            alpha=32,
            dropout=case.get("dropout", 0.0),
            target_modules=tuple(case.get("targets", default_lora_targets(model, "all-linear"))),
            precision=AdapterPrecision(case.get("adapters", "fp32")),
        )
    engine = Engine(case.get("engine", "single"))
    ranks = case.get("ranks", 1)
    zero = replace(ZERO, stage=case.get("stage", 2)) if engine is Engine.DEEPSPEED else None
    return replace(
        BASE,
        method=method,
        lora=lora,
        engine=engine,
        zero=zero,
        gpus_per_node=ranks,
        task=Task(case.get("task", "pretrain")),
        loss=LossHead(case.get("loss", "plain")),
        precision=Precision(case.get("precision", "bf16")),
        attention=Attention(case.get("attention", "sdpa")),
        padding_mask=case.get("padding_mask", False),
        max_length=case.get("max_length", 2048),
        checkpoint_every=case.get("checkpoint_every", 0),
    )


@pytest.mark.parametrize("case", cases("layers.yaml"))
def test_a_layer_keeps_what_was_measured(case: dict[str, Any]) -> None:
    config = configuration(case)
    model = load_model(case["model"], base_dir=Path())
    block = model.groups[0].block
    names = {
        "h": model.hidden_size,
        "q": block.attention.query_width,
        "k": block.attention.key_width,
        "n": block.attention.heads,
        "i": block.mlp.intermediate,
        "r": config.lora.rank if config.lora is not None else 0,
        "T": config.max_length,
    }
    expected = eval(case["bytes"], {"__builtins__": {}}, names)
    kept = saved_tensors(block, layer_mode(config))
    assert sum(item.bytes_per_token for item in kept) == expected, [(item.name, item.formula) for item in kept]


@pytest.mark.parametrize("case", cases("steps.yaml"))
def test_a_step_peaks_where_and_as_high_as_traced(case: dict[str, Any]) -> None:
    config = configuration(case)
    model = load_model(case["model"], base_dir=Path())
    facts = ledger_facts(load_gpu("a100-sxm4-80gb"))
    ledger = Estimator(model, facts).ledger(config).gpu
    workspaces = next(entry for entry in ledger.entries if entry.name == "cublas-workspaces")
    for moment, expected_mib in case["mib"].items():
        added = workspaces.bytes if moment in workspaces.moments else 0
        ours = (ledger.by_moment[Moment(moment)] - added) / 2**20
        assert ours == pytest.approx(expected_mib, rel=case.get("within", 0.003)), moment


def test_layers_are_counted_over_the_whole_model() -> None:
    model = load_model("google/gemma-2-2b", base_dir=Path())
    assert len(model.groups) > 2
    for every in (0, 1, 2, 3, 5):
        marked = sum(group.checkpointed for group in layer_groups(model, every))
        assert marked == sum(1 for layer in range(model.num_layers) if every and layer % every == 0)
        assert sum(group.kept + group.checkpointed for group in layer_groups(model, every)) == model.num_layers
