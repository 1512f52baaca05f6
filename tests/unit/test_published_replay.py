"""The replay of FSDP's steps beside the real ones, whose code ran on phantom cards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from memc.units import GIB

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from published.judging import Judge, capacity_bytes
from published.pinning import pin
from published.records import Record
from published.reserved import replay_of

TITAN = {
    "source": "pytorch/torchtitan",
    "framework": "torchtitan",
    "date": "2025",
    "gpu": "H100",
    "gpu_mem_gb": 96,
    "method": "full (pretraining)",
    "weight_dtype": "fp32 sharded",
    "mixed_precision": "FSDP2 param bf16, reduce fp32",
    "attention": "sdpa",
    "fused_kernels": "none",
    "seq_len": 4096,
}
LLAMA, QWEN = "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-32B"

# torch 2.14.1's fully_shard and allocator, torchtitan's models at d66b72a6a, its wrapping and AdamW, a fake process
# group, no card: reserved GiB after the first and after the third step.
REHEARSED = [
    (LLAMA, 8, 1, "full", "adamw foreach", 21.90, 27.77),
    (QWEN, 8, 1, "full", "adamw fused", 65.74, 81.46),
    (QWEN, 8, 2, "full", "adamw fused", 65.58, 91.24),
    (QWEN, 16, 4, "full", "adamw fused", 67.02, 76.29),
]


def record(model: str, ranks: int, samples: int, checkpointing: str, optimizer: str) -> Record:
    own = {"model": model, "n_gpus": ranks, "sharding": f"FSDP2 {ranks}", "micro_batch": samples}
    return Record({**TITAN, **own, "gradient_checkpointing": checkpointing, "optimizer": optimizer})


@pytest.mark.parametrize(("model", "ranks", "samples", "checkpointing", "optimizer", "first", "third"), REHEARSED)
def test_reserved_memory_is_what_the_real_code_reserves(
    model: str, ranks: int, samples: int, checkpointing: str, optimizer: str, first: float, third: float
) -> None:
    one = record(model, ranks, samples, checkpointing, optimizer)
    pinned = pin(one)
    replay = replay_of(pinned.model, pinned.config, Judge.facts(pinned), capacity_bytes(one, pinned))
    reserved = []
    for _ in range(3):
        replay.step()
        reserved.append(replay.allocator.peak_reserved_bytes / GIB)
    assert reserved[0] == pytest.approx(first, rel=0.01)
    assert reserved[2] == pytest.approx(third, rel=0.015)


# The same torch's FullyShardedDataParallel, wrapped as fsdp_qlora's train.py wraps a model (each adapter's linear and
# each layer), transformers 5.24.0's Llama with the loss of 4.38, PEFT 0.21.2, reentrant checkpointing, 2 ranks:
# reserved GiB after wrapping, allocated and reserved GiB at their peaks.
FLAT = [(4, 8.15, 14.23, 16.24), (6, 8.15, 17.36, 20.61)]
FSDP_QLORA = {
    "framework": "fsdp_qlora (train.py)",
    "model": "meta-llama/Llama-2-7b-hf",
    "gpu": "RTX 3090",
    "gpu_mem_gb": 24,
    "n_gpus": 2,
    "method": "lora",
    "weight_dtype": "bf16",
    "mixed_precision": "bf16 (train.py precision bf16)",
    "optimizer": "adamw",
    "sharding": "FSDP1 FULL_SHARD, BACKWARD_PRE",
    "offload": "none",
    "gradient_checkpointing": "full (reentrant)",
    "attention": "sdpa",
    "fused_kernels": "none",
    "seq_len": 2048,
    "metric": "max_memory_allocated",
    "source_kind": "measured",
    "value_gib": 15.0,
    "lora": {
        "rank": 64,
        "alpha": 16,
        "dropout": 0.1,
        "targets": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
    },
}


@pytest.mark.parametrize(("samples", "loaded", "allocated", "reserved"), FLAT)
def test_flat_parameters_leave_segments_behind(samples: int, loaded: float, allocated: float, reserved: float) -> None:
    one = Record({**FSDP_QLORA, "micro_batch": samples})
    outcome = Judge().judge(one)
    assert outcome.priced_bytes is not None and outcome.pinned is not None, outcome.skipped
    assert outcome.priced_bytes / GIB == pytest.approx(allocated, rel=0.005)
    pinned = outcome.pinned
    replay = replay_of(pinned.model, pinned.config, Judge.facts(pinned), capacity_bytes(one, pinned))
    assert replay.allocator.reserved_bytes / GIB == pytest.approx(loaded, rel=0.06)
    for _ in range(3):
        replay.step()
    assert replay.allocator.peak_reserved_bytes / GIB == pytest.approx(reserved, rel=0.06)


def test_a_card_of_that_name_in_another_size_has_what_the_record_says() -> None:
    one = record(QWEN, 8, 1, "full", "adamw fused")
    assert capacity_bytes(one, pin(one)) == 96 * GIB
    plain = Record({**one.fields, "gpu_mem_gb": 80})
    assert 78 * GIB < (capacity_bytes(plain, pin(plain)) or 0) < 80 * GIB


ENCODER = {
    "model": "google-bert/bert-large-uncased",
    "gpu": "V100",
    "gpu_mem_gb": 16,
    "method": "full",
    "mixed_precision": "none (fp32)",
    "optimizer": "adamw",
    "gradient_checkpointing": "none",
    "attention": "eager",
    "seq_len": 256,
    "micro_batch": 2,
    "metric": "max_memory_allocated",
    "source_kind": "measured",
    "confidence": "high",
    "value_gib": 8.0,
}


def test_softmax_keeps_what_it_read_until_torch_1_11() -> None:
    judge = Judge()
    older, newer = (
        judge.judge(Record({**ENCODER, "versions": f"torch {version}"})) for version in ("1.10.2", "1.11.0")
    )
    assert older.ledger is not None and newer.ledger is not None, older.skipped or newer.skipped
    layers, heads, samples, length = 24, 16, 2, 256
    kept = [next(e.bytes for e in one.ledger.gpu.entries if e.name == "layer-activations") for one in (older, newer)]
    scores = 4 * heads * samples * length * length
    assert 0 <= layers * scores - (kept[0] - kept[1]) <= scores, "the highest layer's is in its working set"


def test_models_of_one_name_with_other_programs_are_priced_apart() -> None:
    plain = {
        "framework": "litgpt",
        "model": "meta-llama/Llama-2-7b-hf",
        "gpu": "A100",
        "gpu_mem_gb": 80,
        "n_gpus": 1,
        "weight_dtype": "bf16",
        "mixed_precision": "bf16-true",
        "optimizer": "adamw",
        "gradient_checkpointing": "none",
        "attention": "flash",
        "seq_len": 512,
        "micro_batch": 1,
        "metric": "max_memory_allocated",
        "source_kind": "measured",
        "value_gib": 20.0,
    }
    lora = Record({**plain, "method": "lora", "lora": {"rank": 8, "alpha": 16, "dropout": 0.05, "targets": "q, v"}})
    prefix = Record({**plain, "method": "adapter"})
    alone, after = Judge().judge(prefix), [judge.judge(one) for judge in [Judge()] for one in (lora, prefix)][1]
    assert alone.priced_bytes is not None, alone.skipped
    assert after.priced_bytes == alone.priced_bytes
