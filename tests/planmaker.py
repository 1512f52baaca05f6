"""Plans built by hand, for tests of what is written from them. The ledger's figures are round, not solved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memc.clock.steptime import StepTime
from memc.config import (
    Attention,
    Engine,
    FsdpConfig,
    LoraConfig,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Task,
    TrainingConfig,
    ZeroConfig,
)
from memc.facts.records import (
    AttentionFacts,
    Block,
    BlockGroup,
    Component,
    GpuFacts,
    Linear,
    MlpFacts,
    ModelFacts,
    Norm,
    NormKind,
)
from memc.ledger.entries import Account, Entry, Ledger, Moment, Resource, resource_ledger
from memc.plan import Budget, Plan, Provenance, RunSettings, TrailStep, Verdict
from memc.units import GIB, MIB

SMOLLM2_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_lora(**changes: Any) -> LoraConfig:
    """Returns adapters on every linear of a llama-like block."""
    return replace(LoraConfig(rank=8, alpha=16, dropout=0.0, target_modules=SMOLLM2_TARGETS), **changes)


def make_zero(stage: int, **changes: Any) -> ZeroConfig:
    """Returns ZeRO settings with small buckets."""
    settings = ZeroConfig(
        stage=stage,
        reduce_bucket_elements=5_000_000,
        allgather_bucket_elements=5_000_000,
        prefetch_elements=1_000_000,
        persistence_elements=10_000,
        max_live_elements=10_000_000,
        sub_group_elements=100_000_000,
        overlap_comm=False,
    )
    return replace(settings, **changes)


def make_config(
    *,
    task: Task = Task.SFT,
    method: Method = Method.LORA,
    engine: Engine = Engine.SINGLE,
    stage: int = 2,
    offload_optimizer: Offload = Offload.NONE,
    offload_param: Offload = Offload.NONE,
    **changes: Any,
) -> TrainingConfig:
    """Returns a consistent configuration; `changes` are fields of TrainingConfig."""
    zero = None
    if engine is Engine.DEEPSPEED:
        zero = make_zero(stage, offload_optimizer=offload_optimizer, offload_param=offload_param)
    config = TrainingConfig(
        task=task,
        method=method,
        precision=Precision.BF16,
        engine=engine,
        gpus_per_node=1 if engine is Engine.SINGLE else 2,
        nodes=1,
        micro_batch_size=1,
        gradient_accumulation_steps=2,
        max_length=128,
        packing=True,
        padding_mask=False,
        attention=Attention.SDPA,
        loss=LossHead.CHUNKED,
        checkpoint_every=1,
        optimizer=Optimizer.ADAMW,
        lora=None if method is Method.FULL else make_lora(),
        zero=zero,
        eval_batch_size=1,
        fsdp=FsdpConfig() if engine is Engine.FSDP else None,
    )
    return replace(config, **changes)


def make_run(**changes: Any) -> RunSettings:
    """Returns settings of a short run."""
    settings = RunSettings(
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        train_data="data/train.jsonl",
        eval_data="",
        epochs=1.0,
        max_steps=0,
        learning_rate=2e-4,
        weight_decay=0.01,
        warmup_ratio=0.0,
        max_grad_norm=1.0,
        lr_scheduler="constant",
        seed=11,
        save_steps=100,
        eval_steps=0,
        logging_steps=1,
        save_total_limit=2,
        output_dir="runs/smollm2",
        assistant_only_loss=False,
        trust_remote_code=False,
    )
    return replace(settings, **changes)


def make_model() -> ModelFacts:
    """Returns the facts of SmolLM2-135M."""
    hidden, key_width, intermediate, layers, vocabulary = 576, 192, 1536, 30, 49152
    attention, mlp = Component.ATTENTION, Component.MLP
    shapes = (
        ("q_proj", attention, hidden, hidden, "attention_input"),
        ("k_proj", attention, hidden, key_width, "attention_input"),
        ("v_proj", attention, hidden, key_width, "attention_input"),
        ("o_proj", attention, hidden, hidden, "attention_output"),
        ("gate_proj", mlp, hidden, intermediate, "mlp_input"),
        ("up_proj", mlp, hidden, intermediate, "mlp_input"),
        ("down_proj", mlp, intermediate, hidden, "mlp_product"),
    )
    linears = tuple(
        Linear(name=name, component=component, in_features=wide, out_features=out, bias=False, reads=reads)
        for name, component, wide, out, reads in shapes
    )
    block = Block(
        layer_class="LlamaDecoderLayer",
        linears=linears,
        norms=(
            _norm("input_layernorm", hidden, "attention_input"),
            _norm("post_attention_layernorm", hidden, "mlp_input"),
        ),
        attention=AttentionFacts(
            heads=9, kv_heads=3, head_dim=64, sliding_window=None, logit_softcap=None, fused_qkv=False
        ),
        mlp=MlpFacts(intermediate=intermediate, gated=True, fused_gate_up=False, activation="silu"),
    )
    return ModelFacts(
        key="HuggingFaceTB/SmolLM2-135M-Instruct",
        model_type="llama",
        architecture="LlamaForCausalLM",
        hidden_size=hidden,
        vocab_size=vocabulary,
        groups=(BlockGroup(block=block, count=layers),),
        final_norm=_norm("norm", hidden, ""),
        embedding_params=vocabulary * hidden,
        head_params=0,
        tied=True,
        head_bias=False,
        logit_softcap=None,
        max_position_embeddings=8192,
        checkpoint_bytes_per_param=2,
        checkpoint_dtype="bfloat16",
        gated_hub=False,
        source="config.json of the model",
        checked="2026-01-01",
    )


def _norm(name: str, size: int, feeds: str) -> Norm:
    return Norm(name=name, kind=NormKind.RMS, size=size, rows=1, params=size, feeds=feeds)


def make_gpu() -> GpuFacts:
    """Returns the facts of a 24 GB card."""
    return GpuFacts(
        key="rtx-4090",
        name="GeForce RTX 4090",
        aliases=(),
        vendor="nvidia",
        architecture="ada",
        compute_capability=(8, 9),
        capacity_bytes=25_250_627_584,
        memory_bytes_per_second=1.008e12,
        achieved_memory_bytes_per_second=None,
        peak_flops_per_second={"bf16": 165.2e12},
        achieved_flops_per_second={},
        pcie_bytes_per_second=32e9,
        nvlink_bytes_per_second=0.0,
        bf16=True,
        flash_attention_2=True,
        bitsandbytes=True,
        usd_per_hour=0.5,
        purchase_usd=None,
        source="data sheet",
        checked="2026-01-01",
    )


def make_ledger() -> Ledger:
    """Returns a small ledger in which every account of the GPU has one entry."""
    alive = frozenset(Moment)
    sizes = {
        Account.PARAMETERS: (269 * MIB, alive),
        Account.GRADIENTS: (5 * MIB, frozenset({Moment.BACKWARD_LAST_LAYER, Moment.STEP})),
        Account.OPTIMIZER_STATES: (10 * MIB, alive - {Moment.LOAD}),
        Account.ACTIVATIONS: (GIB, frozenset({Moment.LOSS, Moment.BACKWARD_FIRST_LAYER})),
        Account.WORKSPACE: (32 * MIB, alive - {Moment.LOAD}),
    }
    entries = [
        Entry(
            name=f"{account.value}-entry".replace("_", "-"),
            account=account,
            resource=Resource.GPU,
            bytes=size,
            moments=moments,
            formula=f"{size} = {size} x 1 B",
            source="made up for a test | with a bar",
        )
        for account, (size, moments) in sizes.items()
    ]
    entries.append(
        Entry(
            name="cuda-context",
            account=Account.WORKSPACE,
            resource=Resource.GPU,
            bytes=500 * MIB,
            moments=alive,
            formula="500 MiB",
            source="made up for a test",
            in_allocator=False,
        )
    )
    return Ledger(
        gpu=resource_ledger(Resource.GPU, entries),
        host=resource_ledger(Resource.HOST, ()),
        nvme=resource_ledger(Resource.NVME, ()),
    )


def make_plan(config: TrainingConfig | None = None, run: RunSettings | None = None, **changes: Any) -> Plan:
    """Returns a plan; `changes` are fields of Plan."""
    plan = Plan(
        name="smollm2.yaml",
        config=config or make_config(),
        run=run or make_run(),
        model=make_model(),
        gpu=make_gpu(),
        ledger=make_ledger(),
        clock=StepTime(
            compute_seconds=0.1,
            bandwidth_seconds=0.05,
            communication_seconds=0.0,
            offload_seconds=0.0,
            tokens_per_step=256,
            world_size=1,
            total_seconds=600.0,
            total_usd=0.08,
            assumptions=("The matrix rate is 60 % of the data sheet's.",),
        ),
        budget=Budget(
            gpu_bytes=22 * GIB,
            capacity_bytes=25_250_627_584,
            reserve_bytes=GIB,
            host_bytes=64 * GIB,
            nvme_bytes=0,
            seconds=None,
            usd=None,
            usd_per_gpu_hour=0.5,
        ),
        rung=4,
        techniques=("gradient-accumulation", "activation-checkpointing"),
        trail=(
            TrailStep(
                rung=1,
                technique="as-asked",
                verdict=Verdict.TOO_LARGE,
                peak_bytes=30 * GIB,
                shortfall_bytes=8 * GIB,
                step_seconds=0.1,
                reason="needs 8.00 GiB more than the budget",
            ),
            TrailStep(
                rung=4,
                technique="activation-checkpointing",
                verdict=Verdict.CHOSEN,
                peak_bytes=2 * GIB,
                shortfall_bytes=0,
                step_seconds=0.15,
                reason="fits",
                fidelity="memory only",
            ),
        ),
        total_steps=100,
        considered=42,
        facts={},
        provenance=(
            Provenance(
                file="train.py",
                key="activation_checkpointing",
                rung=4,
                technique="activation-checkpointing",
                account="activations",
                bytes_saved=3 * GIB,
            ),
        ),
        warnings=("Within 10 % of the budget.",),
    )
    return replace(plan, **changes)
