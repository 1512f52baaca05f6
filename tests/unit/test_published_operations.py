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
WORKSPACES = 2 * (8 * 2**20 + 128 * 2**10)


def measured(op: str, provider: str, size: int, **extra: Any) -> Record:
    dims = {"op": op, "provider": provider, "x_value": size, "extra": extra}
    return Record({"method": "op-level forward+backward", "model_dims": dims})


def left_by_compiler(length: int) -> int:
    """What the translator's cycle holds: weight and gradient, four samples and their gradient, a chunk of two."""
    return 2 * 2 * VOCAB * HIDDEN + (2 * 4 + 2) * 2 * length * HIDDEN


def head(op: str, provider: str, samples: int, length: int) -> int:
    return operation_bytes(measured(op, provider, samples, T=length, H=HIDDEN, V=VOCAB))


@pytest.mark.parametrize("op", ["fused_linear_orpo_loss", "fused_linear_simpo_loss"])
def test_scored_preference_holds_fp32_logs_of_all_and_of_the_chosen(op: str) -> None:
    samples, length = 4, 1024
    rows = samples * length
    weights, inputs, logits = 3 * 2 * VOCAB * HIDDEN, 2 * 2 * rows * HIDDEN, 4 * rows * VOCAB
    # kept: log-probabilities of all and of the chosen half; made: zeros of the gather, gradient of the logits
    expected = weights + inputs + logits + logits // 2 + 2 * logits
    expected += WORKSPACES + left_by_compiler(length)
    assert 0 <= head(op, "huggingface", samples, length) - expected <= ROW_BYTES * rows


def test_the_first_orpo_script_keeps_16_bit_logs() -> None:
    samples, length = 2, 4096
    rows = samples * length
    weights, inputs, logits = 3 * 2 * VOCAB * HIDDEN, 2 * 2 * rows * HIDDEN, 2 * rows * VOCAB
    expected = weights + inputs + logits + logits // 2 + 2 * logits
    expected += WORKSPACES + left_by_compiler(length)
    assert 0 <= head("fused_linear_orpo_loss", "huggingface", samples, length) - expected <= ROW_BYTES * rows


def test_a_chunk_is_one_pair_whatever_the_batch() -> None:
    more = [head("fused_linear_simpo_loss", "liger", samples, 512) for samples in (2, 4, 8)]
    a_sequence = 2 * 512 * HIDDEN
    assert more[1] - more[0] == 3 * 2 * a_sequence
    assert more[2] - more[1] == 3 * 4 * a_sequence
    around = 4 * 2 * VOCAB * HIDDEN + WORKSPACES + left_by_compiler(512)
    chunk = chunk_bytes("fused_linear_simpo_loss", 512, VOCAB, HIDDEN)
    assert more[0] == around + 2 * 2 * a_sequence + chunk, "the input and the gradient of the run before; the chunk"


def test_a_chunk_holds_logits_and_the_zeros_of_the_gather_or_the_weight_gradient() -> None:
    rows, simpo = 2 * 512, "fused_linear_simpo_loss"
    assert chunk_bytes(simpo, 512, VOCAB, HIDDEN) == 2 * rows * HIDDEN + (2 + 4) * rows * VOCAB
    assert chunk_bytes(simpo, 1, VOCAB, HIDDEN) == 2 * (2 * 2 * HIDDEN) + 2 * 2 * VOCAB + 2 * VOCAB * HIDDEN


@pytest.mark.parametrize("op", ["fused_linear_orpo_loss", "fused_linear_cpo_loss"])
def test_the_likelihood_of_the_chosen_half_is_scattered_into_zeros_of_its_own(op: str) -> None:
    with_it, without = (chunk_bytes(name, 512, VOCAB, HIDDEN) for name in (op, "fused_linear_simpo_loss"))
    assert with_it - without == 4 * 512 * VOCAB


def test_a_later_chunk_of_ligers_head_lies_beside_the_gradient_of_the_one_before() -> None:
    vocab, hidden = 1024, 256

    def whole(rows: int) -> int:
        return operation_bytes(measured("fused_linear_cross_entropy", "liger", rows, H=hidden, V=vocab))

    weights = 4 * 2 * vocab * hidden + WORKSPACES
    assert whole(1) == weights + 3 * 2 * hidden + 6 * vocab, "one chunk"
    assert whole(64) == weights + 3 * 2 * 64 * hidden + 8 * 16 * vocab, "four of sixteen"


def test_ligers_norm_is_left_out_with_the_reason() -> None:
    with pytest.raises(Skip, match="collects at no known time"):
        operation_bytes(measured("rms_norm", "liger", 512, M=128))


@pytest.mark.parametrize(("op", "provider"), [("fused_linear_dpo_loss", "liger"), ("rms_norm", "another"), ("", "")])
def test_what_is_not_described_is_left_out(op: str, provider: str) -> None:
    with pytest.raises(Skip, match="not described"):
        operation_bytes(measured(op, provider, 8, T=1024, H=HIDDEN, V=VOCAB))


@pytest.mark.parametrize("op", ["fused_linear_orpo_loss", "swiglu"])
def test_an_operation_without_sizes_is_left_out(op: str) -> None:
    with pytest.raises(Skip, match="without sizes"):
        operation_bytes(measured(op, "liger", 8))


def test_a_given_gradient_of_another_type_is_cast_beside_it() -> None:
    rows, width = 128, 512
    found = operation_bytes(measured("rms_norm", "huggingface", width, M=rows))
    of_input = 2 * rows * width
    assert abs(found - 20 * of_input) <= ROW_BYTES * rows + 4 * 4 * width
