"""Published step times: what their words mean, what is left out and why, and that no record stops the comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memc.clock.workload import AttentionKernel, Kernels, Sharding
from memc.config import Offload

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import accuracy_time
from timed.machines import machine_of
from timed.models import model_of
from timed.reading import UnreadableError, number, whole
from timed.words import attention_of, kernels_of, offload_of, parallel_of, recompute_of, shards_of
from timed.workloads import timed

RECORD: dict[str, Any] = {
    "id": "one-001",
    "source": "somewhere",
    "gpu": "A100 80GB SXM",
    "n_gpus": 8,
    "n_nodes": 1,
    "model": "meta-llama/Llama-2-7b-hf",
    "params_b": 6.74,
    "method": "full",
    "dtype": "bf16",
    "sharding": "FSDP FULL_SHARD",
    "checkpointing": "full",
    "attention": "flash-attn 2",
    "micro_batch": 4,
    "grad_accum": 1,
    "seq_len": 4096,
    "global_batch": 32,
    "tokens_per_sec_per_gpu": 3200.0,
    "step_time_s": 5.12,
    "confidence": "high",
}


@pytest.mark.parametrize(
    ("words", "kernels"),
    [
        ("torch.compile", Kernels.COMPILED),
        ("eager (before compile was added)", Kernels.EAGER),
        ("no compile", Kernels.EAGER),
        ("accelerated-peft-bnb-foak-liger", Kernels.FUSED),
        ("none (HF transformers)", Kernels.EAGER),
        ("", Kernels.EAGER),
    ],
)
def test_who_writes_the_kernels(words: str, kernels: Kernels) -> None:
    assert kernels_of(words) is kernels


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ("flash-attn 2", AttentionKernel.FLASH2),
        ("SDPA flash", AttentionKernel.FLASH2),
        ("flash (default)", AttentionKernel.FLASH1),
        ("FlashAttention-3", AttentionKernel.FLASH3),
        ("eager", AttentionKernel.EAGER),
        ("", AttentionKernel.FLASH2),
    ],
)
def test_which_attention_is_meant(words: str, kernel: AttentionKernel) -> None:
    assert attention_of(words, predates=False)[0] is kernel
    if not words:
        assert attention_of(words, predates=True)[0] is AttentionKernel.EAGER


def test_degrees_of_parallelism_are_read_in_every_spelling() -> None:
    for words in ("tp=8 pp=12 dp=4", "FSDP4 TP8 PP12", "dp=4 tp=8 pp=12"):
        found = parallel_of(words)
        assert (found.data, found.tensor, found.stages) == (4, 8, 12)
    assert parallel_of("FSDP4 CP2").context == 2
    assert parallel_of("").tensor == 1
    with pytest.raises(UnreadableError, match="expert"):
        parallel_of("tp4 ep8 pp8")
    with pytest.raises(UnreadableError, match="not stated"):
        parallel_of("tp+pp+sequence parallel")


@pytest.mark.parametrize(
    ("words", "kind", "within"),
    [
        ("FSDP FULL_SHARD", Sharding.WEIGHTS, False),
        ("FSDP HYBRID_SHARD", Sharding.WEIGHTS, True),
        ("FSDP SHARD_GRAD_OP", Sharding.GRADIENTS, False),
        ("DeepSpeed ZeRO-1", Sharding.STATES, False),
        ("ZeRO-2 offload", Sharding.GRADIENTS, False),
        ("DDP", Sharding.NONE, False),
    ],
)
def test_what_is_sharded(words: str, kind: Sharding, within: bool) -> None:
    found = shards_of(words, several=True)
    assert (found.kind, found.within_node) == (kind, within)


def test_what_is_computed_again_and_what_waits_on_the_host() -> None:
    assert recompute_of("none") == (0.0, 0.0, False)
    assert recompute_of("full (reentrant)") == (1.0, 1.0, True)
    assert recompute_of("selective (per-op)") == (1.0, 0.5, False)
    assert recompute_of("") is None
    assert offload_of("optimizer to CPU") == (Offload.CPU, Offload.NONE, False)
    assert offload_of("activations to CPU") == (Offload.NONE, Offload.NONE, True)
    with pytest.raises(UnreadableError, match="offload scheme"):
        offload_of("ZenFlow")


def test_machines_are_read_from_their_words() -> None:
    assert machine_of({"gpu": "A100-SXM4-40GB", "n_gpus": 2}).gpu.key == "a100-sxm4-40gb"
    assert machine_of({"gpu": "H100 80GB SXM", "n_gpus": 16}).nodes == 2
    capped = machine_of({"gpu": "H100 (500 W cap)", "n_gpus": 8, "interconnect": "400 Gb/s per GPU RDMA"})
    assert capped.power_limit_watts == 500
    assert capped.network_bytes_per_second == pytest.approx(0.85 * 50e9)
    adapters = machine_of({"gpu": "A100", "n_gpus": 16, "interconnect": "8 x HDR InfiniBand per node"})
    assert adapters.network_bytes_per_second == pytest.approx(0.85 * 25e9)
    with pytest.raises(UnreadableError, match="not in the catalogue"):
        machine_of({"gpu": "TITAN RTX", "n_gpus": 1})


def test_models_are_found_by_name_by_size_and_by_dimensions() -> None:
    assert model_of({"model": "Llama2-7b"})[0].num_layers == 32
    assert model_of({"model": "MPT-3b", "params_b": 2.65})[0].hidden_size == 2560
    printed = model_of({"model": "GPT 10B", "dims": "d4096 h16 L50"})[0]
    assert (printed.hidden_size, printed.num_layers) == (4096, 50)
    with pytest.raises(UnreadableError):
        model_of({"model": "some model"})


def test_a_record_becomes_a_workload() -> None:
    case = timed(RECORD)
    assert case.compute.tokens == 4 * 4096
    assert case.layout.shard_ranks == 8
    assert case.measured_seconds == 5.12
    assert case.compute.recompute == 1.0


def test_rows_that_cannot_be_true_or_are_not_sure_are_left_out() -> None:
    rows = [
        {**RECORD, "confidence": "low"},
        {**RECORD, "notes": "3.5x slower than its neighbours: anomalous"},
        {**RECORD, "step_time_s": 0.05},
        {**RECORD, "method": "loha"},
        RECORD,
    ]
    compared, reasons, eligible = accuracy_time.compare(rows)
    assert (len(compared), eligible) == (1, 2)
    assert reasons["not eligible: its rate is above the card's peak"] == 1
    assert reasons["method 'loha' is not one that memc writes"] == 1


def test_the_last_line_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(yaml.safe_dump([RECORD, {**RECORD, "micro_batch": 2, "step_time_s": 2.7}]))
    assert accuracy_time.main([str(path), "--write", str(tmp_path / "out.yaml")]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["count"], last["coverage"]) == (2, 1.0)
    assert last["median"] < 0.3
    assert yaml.safe_load((tmp_path / "out.yaml").read_text())["count"] == 2


def test_ranks_are_compared_and_not_values() -> None:
    assert accuracy_time.rank_correlation([1, 2, 3, 4], [10, 20, 300, 4000]) == pytest.approx(1.0)
    assert accuracy_time.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert accuracy_time.rank_correlation([1, 1, 1], [3, 2, 1]) is None


def test_numbers_are_numbers() -> None:
    assert (number("3.5"), number(None), number(-1), number(True), number("x")) == (3.5, None, None, None, None)
    assert (whole(8), whole(8.5), whole("8")) == (8, None, 8)


@given(
    st.dictionaries(
        st.sampled_from(sorted(RECORD)),
        st.one_of(st.none(), st.text(max_size=12), st.integers(-5, 10**6), st.floats(), st.lists(st.integers())),
    )
)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_record_stops_the_comparison(changed: dict[str, Any]) -> None:
    compared, reasons, eligible = accuracy_time.compare([{**RECORD, **changed}])
    assert len(compared) + sum(reasons.values()) == 1
    assert eligible in (0, 1)
