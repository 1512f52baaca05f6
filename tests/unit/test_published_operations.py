"""Single operations of published benchmarks: what they make, by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from published.alone import operation_bytes
from published.preference import chunk_bytes
from published.records import Record, Skip

HIDDEN, VOCAB, ROW_BYTES = 256, 8192, 64
MIB = 2**20


def measured(op: str, provider: str, size: int, **extra: Any) -> Record:
    dims = {"op": op, "provider": provider, "x_value": size, "extra": extra}
    return Record({"method": "op-level forward+backward", "model_dims": dims})


def head(op: str, provider: str, samples: int, length: int) -> int:
    return operation_bytes(measured(op, provider, samples, T=length, H=HIDDEN, V=VOCAB))


@pytest.mark.parametrize("op", ["fused_linear_orpo_loss", "fused_linear_simpo_loss"])
def test_scored_preference_holds_fp32_logs_of_all_and_of_the_chosen(op: str) -> None:
    samples, length = 4, 1024
    rows = samples * length
    weights, inputs, logits = 3 * 2 * VOCAB * HIDDEN, 2 * 2 * rows * HIDDEN, 4 * rows * VOCAB
    # kept: log-probabilities of all and of the chosen half; made: zeros of the gather, gradient of the logits
    expected = weights + inputs + logits + logits // 2 + 2 * logits
    assert 0 <= head(op, "huggingface", samples, length) - expected <= ROW_BYTES * rows


def test_the_first_orpo_script_keeps_16_bit_logs() -> None:
    samples, length = 2, 4096
    rows = samples * length
    weights, inputs, logits = 3 * 2 * VOCAB * HIDDEN, 2 * 2 * rows * HIDDEN, 2 * rows * VOCAB
    expected = weights + inputs + logits + logits // 2 + 2 * logits
    assert 0 <= head("fused_linear_orpo_loss", "huggingface", samples, length) - expected <= ROW_BYTES * rows


def test_a_chunk_is_one_pair_whatever_the_batch() -> None:
    more = [head("fused_linear_simpo_loss", "liger", samples, 512) for samples in (2, 4, 8)]
    a_sequence = 2 * 512 * HIDDEN
    assert more[1] - more[0] == 3 * 2 * a_sequence
    assert more[2] - more[1] == 3 * 4 * a_sequence
    weights = 4 * 2 * VOCAB * HIDDEN
    assert more[0] == weights + 3 * 2 * a_sequence + chunk_bytes(512, VOCAB, HIDDEN) + 8 * MIB


def test_a_chunk_holds_logits_and_the_zeros_of_the_gather_or_the_weight_gradient() -> None:
    rows = 2 * 512
    assert chunk_bytes(512, VOCAB, HIDDEN) == 2 * rows * HIDDEN + (2 + 4) * rows * VOCAB
    assert chunk_bytes(1, VOCAB, HIDDEN) == 2 * (2 * 2 * HIDDEN) + 2 * 2 * VOCAB + 2 * VOCAB * HIDDEN


def test_ligers_norm_makes_fp32_products_of_every_row() -> None:
    rows, width = 128, 512
    found = operation_bytes(measured("rms_norm", "liger", width, M=rows))
    assert found == (4 * 2 + 4) * rows * width + 4 * rows + 4 * 4 * width


@pytest.mark.parametrize(("op", "provider"), [("fused_linear_dpo_loss", "liger"), ("rms_norm", "another"), ("", "")])
def test_what_is_not_described_is_left_out(op: str, provider: str) -> None:
    with pytest.raises(Skip, match="not described"):
        operation_bytes(measured(op, provider, 8, T=1024, H=HIDDEN, V=VOCAB))


@pytest.mark.parametrize("op", ["fused_linear_orpo_loss", "rms_norm"])
def test_an_operation_without_sizes_is_left_out(op: str) -> None:
    with pytest.raises(Skip, match="without sizes"):
        operation_bytes(measured(op, "liger", 8))


def test_a_given_gradient_of_another_type_is_cast_beside_it() -> None:
    rows, width = 128, 512
    found = operation_bytes(measured("rms_norm", "huggingface", width, M=rows))
    of_input = 2 * rows * width
    assert abs(found - 20 * of_input) <= ROW_BYTES * rows + 4 * 4 * width
