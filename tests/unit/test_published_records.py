"""Published memory records: reading rules, comparison, summary, and the tool on records of our own making."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memc.config import (
    AdapterPrecision,
    Attention,
    BasePrecision,
    Engine,
    Method,
    Offload,
    Optimizer,
    Precision,
    Quantization,
)
from memc.ledger.constants import CrossEntropy

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from published import readings  # noqa: E402
from published.caching import CachingAllocator  # noqa: E402
from published.judging import judge_all  # noqa: E402
from published.kernels import as_litgpt, replaced, with_prefixes  # noqa: E402
from published.models import read_model  # noqa: E402
from published.pinning import match_targets, pin, read_gpu  # noqa: E402
from published.readings import Metric  # noqa: E402
from published.records import Record, Skip, read_records, whole_number  # noqa: E402
from published.stacks import for_family, read_software  # noqa: E402
from published.summary import summarise, weighted_quantile  # noqa: E402

SAMPLE = Path(__file__).with_name("published_records.yaml")
MIB = 2**20


def record(**fields: Any) -> Record:
    return Record(fields)


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        ("max_memory_allocated (HF Trainer train-stage probe, rank 0)", Metric.ALLOCATED),
        ("torch allocated_bytes.all.peak", Metric.ALLOCATED),
        ("max_memory_reserved, worst rank", Metric.RESERVED),
        ("nvidia-smi/NVML total used at end of training", Metric.DEVICE),
    ],
)
def test_the_metric_is_what_the_source_counts(text: str, metric: Metric) -> None:
    assert readings.read_metric(record(metric=text)) is metric


@pytest.mark.parametrize("text", [None, "", "unspecified (README)", "a figure"])
def test_a_metric_that_is_not_said_leaves_the_record_out(text: str | None) -> None:
    with pytest.raises(Skip, match="does not say"):
        readings.read_metric(record(metric=text))


def test_a_sum_over_gpus_is_no_figure_of_one() -> None:
    with pytest.raises(Skip, match="sum over"):
        readings.read_metric(record(metric="max_memory_allocated", per_gpu=False))


@pytest.mark.parametrize(
    ("method", "weights", "read"),
    [
        ("full", "bf16", Method.FULL),
        ("full (pretraining)", "fp32 sharded", Method.FULL),
        ("lora", "bf16", Method.LORA),
        ("lora", "nf4", Method.QLORA),
        ("qlora", "gptq int4 base + fp16", Method.QLORA),
    ],
)
def test_methods(method: str, weights: str, read: Method) -> None:
    assert readings.read_method(record(method=method, weight_dtype=weights)) is read


@pytest.mark.parametrize(
    "method", ["full (PPO)", "lora (kto)", "adapter_v2 on nf4", "full (pretraining, GaLore)", "", None]
)
def test_methods_that_memc_does_not_know(method: str | None) -> None:
    with pytest.raises(Skip, match="training method"):
        readings.read_method(record(method=method))


@pytest.mark.parametrize(
    ("mixed", "weights", "method", "read"),
    [
        (
            "none (trainer bf16/fp16 flags unset: pure bf16)",
            "bf16",
            Method.FULL,
            (Precision.BF16_PURE, BasePrecision.HALF),
        ),
        ("bf16 autocast (HF TrainingArguments bf16=True)", "bf16", Method.FULL, (Precision.BF16, BasePrecision.HALF)),
        ("bf16-true (all params incl. LoRA in bf16)", "bf16", Method.LORA, (Precision.BF16_PURE, BasePrecision.HALF)),
        ("fp16 autocast", "fp32", Method.FULL, (Precision.FP16, BasePrecision.FP32)),
        ("none (fp32)", "fp32", Method.FULL, (Precision.FP32, BasePrecision.SCRIPT)),
        ("bf16 DeepSpeed", "bf16 (ZeRO-3)", Method.FULL, (Precision.BF16, BasePrecision.HALF)),
        ("bf16", "nf4", Method.QLORA, (Precision.BF16, BasePrecision.SCRIPT)),
    ],
)
def test_precisions(mixed: str, weights: str, method: Method, read: object) -> None:
    assert readings.read_precision(record(mixed_precision=mixed, weight_dtype=weights), method) == read


@pytest.mark.parametrize("mixed", ["bf16, fp8 hybrid tensorwise", "amp_fp8, FSDP mixed_precision=DEFAULT"])
def test_narrow_products_leave_the_record_out(mixed: str) -> None:
    with pytest.raises(Skip, match="8-bit"):
        readings.read_precision(record(mixed_precision=mixed, weight_dtype="bf16"), Method.FULL)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("adamw_torch (HF default, foreach)", Optimizer.ADAMW_FOREACH),
        ("adamw_torch_fused (hf default)", Optimizer.ADAMW),
        ("bnb PagedAdamW", Optimizer.PAGED_ADAMW),
        ("paged_adamw_8bit", Optimizer.PAGED_ADAMW_8BIT),
        ("adamw_bnb_8bit", Optimizer.ADAMW_8BIT),
        ("bnb Adam8bit", Optimizer.ADAMW_8BIT),
    ],
)
def test_optimizers(text: str, read: Optimizer) -> None:
    assert readings.read_optimizer(record(optimizer=text)) is read


@pytest.mark.parametrize("text", ["adafactor", "torchao AdamWFp8", "lpmm 4-bit AdamW", "MeZO-SGD (no states)", None])
def test_optimizers_that_memc_does_not_know(text: str | None) -> None:
    with pytest.raises(Skip, match="optimizer"):
        readings.read_optimizer(record(optimizer=text))


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("none", 0),
        ("full (re-entrant)", 1),
        ("true", 1),
        ("selective: every 2nd layer", 2),
        ("selective: every 4th layer", 4),
    ],
)
def test_checkpointing(text: str, every: int) -> None:
    assert readings.read_checkpointing(record(gradient_checkpointing=text)) == every


@pytest.mark.parametrize("text", [None, "selective", "selective per-op (titan default)"])
def test_checkpointing_by_an_unknown_rule_leaves_the_record_out(text: str | None) -> None:
    with pytest.raises(Skip):
        readings.read_checkpointing(record(gradient_checkpointing=text))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("flash-attn 3 (H200) / 4 (B200)", Attention.FLASH_ATTENTION_2),
        ("sdpa (hf default)", Attention.SDPA),
        ("unfused", Attention.EAGER),
    ],
)
def test_attention(text: str, read: Attention) -> None:
    assert readings.read_attention(record(attention=text)) is read


@pytest.mark.parametrize(
    ("sharding", "gpus", "engine", "version", "stage"),
    [
        ("none", 1, Engine.SINGLE, 0, 0),
        ("DDP", 4, Engine.DDP, 0, 0),
        (None, 2, Engine.DDP, 0, 0),
        ("FSDP1 FULL_SHARD (accelerate, TRANSFORMER_BASED_WRAP, BACKWARD_PRE)", 2, Engine.FSDP, 1, 0),
        ("FSDP2 8 x TP 1", 8, Engine.FSDP, 2, 0),
        ('FSDP NO_SHARD ("ddp" option)', 2, Engine.DDP, 0, 0),
        ("DeepSpeed ZeRO-3", 8, Engine.DEEPSPEED, 0, 3),
        ("DeepSpeed zero2", 8, Engine.DEEPSPEED, 0, 2),
    ],
)
def test_sharding(sharding: str | None, gpus: int, engine: Engine, version: int, stage: int) -> None:
    read = readings.read_sharding(record(sharding=sharding, n_gpus=gpus))
    assert (read.engine, read.fsdp, read.stage) == (engine, version, stage)


@pytest.mark.parametrize(
    "fields",
    [
        {"sharding": "TP2 x FSDP2 4", "parallelism": {"tp": 2, "dp_shard": 4}},
        {"sharding": "none", "parallelism": {"pp": 4}},
        {"sharding": "none", "parallelism": {"sequence_parallel": 4}},
        {"sharding": "megatron (distributed optimizer default in swift)"},
        {"sharding": "device_map layer split"},
        {"sharding": "FSDP1 SHARD_GRAD_OP"},
    ],
)
def test_other_parallelism_leaves_the_record_out(fields: dict[str, Any]) -> None:
    with pytest.raises(Skip):
        readings.read_sharding(record(**fields))


@pytest.mark.parametrize(
    ("offload", "read"),
    [
        ("none", (Offload.NONE, Offload.NONE)),
        ("optimizer CPU", (Offload.CPU, Offload.NONE)),
        ("FSDP cpu_offload (params/grads/opt)", (Offload.CPU, Offload.CPU)),
    ],
)
def test_offload(offload: str, read: object) -> None:
    assert readings.read_offload(record(offload=offload, sharding="none")) == read


def test_a_length_that_is_only_a_limit_is_no_length() -> None:
    with pytest.raises(Skip, match="limit"):
        readings.read_shape(record(micro_batch=1, seq_len=2048, seq_len_kind="cap (not packed)"))


def test_numbers_are_read_from_texts_that_start_with_one() -> None:
    assert [whole_number(value) for value in (8, "8 (default)", 8.0, "8.5", None, True, "none")] == [
        8,
        8,
        8,
        None,
        None,
        None,
        None,
    ]


def test_a_repackaged_checkpoint_means_its_full_model() -> None:
    plain = read_model(record(model="mistralai/Mistral-7B-v0.1"))
    assert read_model(record(model="TheBloke/Mistral-7B-v0.1-GPTQ")).total_params == plain.total_params


def test_a_family_with_sizes_and_dimensions_beside_a_name() -> None:
    assert read_model(record(model="some MPT-7b")).num_layers == 32
    dims = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 100}
    assert read_model(record(model="a llama of our own", model_dims=dims)).num_layers == 4


def test_a_model_that_nobody_knows_leaves_the_record_out() -> None:
    with pytest.raises(Skip, match="family"):
        read_model(record(model="nobody/knows", model_dims={"layers": 4}))


def test_cards_by_name_and_size() -> None:
    assert read_gpu(record(gpu="A100", gpu_mem_gb=40)).key == "a100-sxm4-40gb"
    assert read_gpu(record(gpu="H100 (95.04 GiB)", gpu_mem_gb=96)).key == "h100-sxm5-80gb"
    with pytest.raises(Skip, match="card"):
        read_gpu(record(gpu="24GB class"))


def test_targets_by_letters_words_names_and_patterns() -> None:
    model = read_model(record(model="meta-llama/Llama-2-7b-hf"))
    assert match_targets(model, "q,v") == ("q_proj", "v_proj")
    assert match_targets(model, ["o_proj", "q_proj", "c_attn"]) == ("q_proj", "o_proj")
    assert len(match_targets(model, "all-linear")) == 7
    pattern = r"model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
    assert len(match_targets(model, pattern)) == 7
    with pytest.raises(Skip):
        match_targets(model, ["nothing"])


@pytest.mark.parametrize(
    ("version", "kept", "shifted"),
    [("4.45.2", False, True), ("4.48.1", True, True), ("4.49.0", True, False), ("5.24.0", True, False)],
)
def test_the_loss_follows_the_version_of_transformers(version: str, kept: bool, shifted: bool) -> None:
    stack = read_software(record(versions=f"torch 2.4.1, transformers {version}, peft 0.13.2")).stack
    assert (stack.logits_kept, stack.shifted_copy) == (kept, shifted)


def test_kernels_that_are_named_decide_the_loss_and_the_norms() -> None:
    assert read_software(record(fused_kernels="liger")).stack.cross_entropy is CrossEntropy.LINEAR
    assert read_software(record(fused_kernels="triton fused CE, RMSNorm, RoPE")).stack.fused_norm
    assert read_software(record(fused_kernels="none")).stack.cross_entropy is CrossEntropy.TORCH


def test_functions_of_a_program_are_replaced_by_name() -> None:
    program = "def block(x):\n    return norm(x)\n\ndef norm(x):\n    return x * x\n"
    assert replaced(program, {"norm": "def norm(x):\n    return x\n"}) == (
        "def block(x):\n    return norm(x)\n\ndef norm(x):\n    return x\n"
    )


def test_a_record_becomes_a_configuration() -> None:
    found = {item.id: item for item in read_records(SAMPLE)}
    config = pin(found["own_reserved"]).config
    assert (config.engine, config.world_size, config.micro_batch_size) == (Engine.FSDP, 2, 2)
    assert config.fsdp is not None and config.fsdp.version == 1
    assert config.reentrant_checkpointing and config.checkpoint_every == 1
    assert config.lora is not None and config.lora.precision is AdapterPrecision.FP32
    fits = pin(found["own_fits"]).config
    assert (fits.method, fits.quantization, fits.double_quantization) == (Method.QLORA, Quantization.NF4, True)
    assert fits.lora is not None and (fits.lora.rank, fits.lora.target_modules) == (8, ("q_proj", "v_proj"))


def test_every_record_is_judged_or_left_out_with_a_reason() -> None:
    outcomes = {item.record.id: item for item in judge_all(read_records(SAMPLE))}
    assert outcomes["own_full_step"].error == pytest.approx(0, abs=0.12)
    assert outcomes["own_reserved"].metric is Metric.RESERVED
    assert outcomes["own_reserved"].error is not None
    assert outcomes["own_fits"].right is True
    assert outcomes["own_oom"].right is True
    assert outcomes["own_nobody_knows"].skipped
    assert "does not say" in outcomes["own_unspecified"].skipped
    summary = summarise(list(outcomes.values()))
    assert (summary.eligible, summary.errors.count, summary.verdicts, summary.right) == (3, 2, 2, 2)
    assert not summary.oom_as_fit


def test_a_quantile_weighs_groups() -> None:
    pairs = [(0.1, 0.25), (0.1, 0.25), (0.2, 0.25), (0.3, 0.25), (0.9, 1.0)]
    assert weighted_quantile(pairs, 0.5) == 0.3
    assert weighted_quantile(pairs, 0.51) == 0.9
    assert weighted_quantile([], 0.5) == 0.0


def test_the_allocator_rounds_splits_merges_and_gives_back() -> None:
    allocator = CachingAllocator()
    small, medium, large = (allocator.allocate(size) for size in (100, 2 * MIB, 25 * MIB + 1))
    assert allocator.reserved_bytes == (2 + 20 + 26) * MIB
    assert allocator.allocated_bytes == 512 + 2 * MIB + 26 * MIB  # what is left of the last is too small to be cut off
    allocator.free(medium)
    again = allocator.allocate(20 * MIB)  # the medium segment, whole again
    assert allocator.reserved_bytes == 48 * MIB
    other = allocator.allocate(15 * MIB, stream=1)  # another stream has a pool of its own
    assert allocator.reserved_bytes == 64 * MIB
    allocator.free(large)
    part = allocator.allocate(11 * MIB)  # cut from the freed segment
    assert allocator.reserved_bytes == 64 * MIB
    for block in (small, again, other, part):
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.release_cached()
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (0, 64 * MIB)


def test_cached_segments_are_given_back_before_the_card_is_full() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.peak_reserved_bytes == 80 * MIB


def test_the_tool_prints_one_json_object_last(tmp_path: Path) -> None:
    results = tmp_path / "results.yaml"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "accuracy_memory.py"), str(SAMPLE), "--write", str(results)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"models", "count", "coverage", "median", "p90", "worst", "verdicts_right"}
    assert (figures["count"], figures["coverage"], figures["verdicts_right"]) == (2, 0.6667, 1.0)
    assert "the source does not say what its figure counts" in done.stdout
    assert results.read_text(encoding="utf-8").startswith("# Written by make accuracy-memory")


@pytest.mark.parametrize("text", ["{", "1", "records: no"])
def test_a_file_that_is_no_list_of_records_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "records.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"records\.yaml"):
        read_records(path)


def test_a_learned_prefix_is_in_the_layers_from_the_third_on() -> None:
    fields = {"framework": "litgpt", "method": "adapter on nf4", "weight_dtype": "bnb.nf4 base"}
    assert readings.read_method(Record(fields)) is Method.QLORA
    with pytest.raises(Skip, match="adapter"):
        readings.read_method(Record({**fields, "method": "adapter_v2 on nf4"}))
    plain = as_litgpt(read_model(Record({"model": "meta-llama/Llama-2-7b-hf"})))
    prefixed = with_prefixes(plain)
    assert [group.count for group in prefixed.groups] == [2, 30]
    assert "prefix" not in prefixed.groups[0].block.forward
    assert "prefix_attention(q)" in prefixed.groups[1].block.forward
    assert prefixed.total_params == plain.total_params


def test_what_a_family_does_follows_version_and_autocast() -> None:
    software = replace(read_software(Record({})), transformers=(4, 48, 1))
    wide = for_family(software, "gpt_bigcode", autocast=True, checkpointed=True).stack
    assert (wide.narrow_shift, wide.keeps_keys, wide.logits_upcast) == (True, True, True)
    pure = for_family(software, "gpt_bigcode", autocast=False, checkpointed=False).stack
    assert (pure.narrow_shift, pure.keeps_keys, pure.logits_upcast) == (False, False, False)
    later = replace(software, transformers=(4, 49, 0))
    assert for_family(later, "gpt_bigcode", autocast=True, checkpointed=True) == later
    assert for_family(software, "llama", autocast=True, checkpointed=True) == software
