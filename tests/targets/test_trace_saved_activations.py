"""What a layer keeps for backward, against a count by hand from the modelling code."""

from __future__ import annotations

from typing import Any

import pytest
from trace_cases import config, llama

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.trace import trace_step

TOKENS = 256
H, Q, K, F, N, KV, R = 672, 576, 192, 1600, 6, 2, 16
LINEAR_WEIGHTS = 2 * H * Q + 2 * H * K + 3 * H * F
ADAPTER_WEIGHTS = R * (2 * (H + Q) + 2 * (H + K) + 3 * (H + F))
FLASH = 4 * Q + 4 * K + 4 * N
FROZEN = 8 * H + 6 * F + 8
INPUTS = 5 * H + Q + F
RANDOM_STATE = 24

BY_HAND: dict[str, tuple[dict[str, Any], int, int]] = {
    "full-bf16-weights": ({"precision": "bf16_pure"}, 16 * H + 8 * F + 8 + FLASH, 0),
    "full-autocast": ({}, 26 * H + 8 * F + 8 + FLASH, 2 * LINEAR_WEIGHTS),
    "lora-fp32-adapters": ({"method": "lora"}, FROZEN + FLASH + 2 * INPUTS + 14 * R, 2 * ADAPTER_WEIGHTS),
    "lora-dropout": (
        {"method": "lora", "dropout": 0.1},
        FROZEN + FLASH + 3 * INPUTS + 14 * R,
        2 * ADAPTER_WEIGHTS,
    ),
    "lora-no-autocast": (
        {"method": "lora", "precision": "bf16_pure"},
        FROZEN + FLASH + 4 * INPUTS + 28 * R,
        0,
    ),
    "lora-bf16-adapters": (
        {"method": "lora", "adapters": "base"},
        FROZEN + FLASH + 4 * H + 2 * F + 14 * R,
        0,
    ),
    "lora-under-deepspeed": (
        {"method": "lora", "engine": "deepspeed"},
        FROZEN + FLASH + 4 * H + 2 * F + 14 * R,
        0,
    ),
    "qlora-casts-nothing-under-autocast": (
        {"method": "qlora", "task": "sft"},
        FROZEN + FLASH + 4 * H + 2 * F + 14 * R,
        2 * ADAPTER_WEIGHTS,
    ),
    "qlora-dropout": (
        {"method": "qlora", "task": "sft", "dropout": 0.1},
        FROZEN + FLASH + 3 * INPUTS + 14 * R,
        2 * ADAPTER_WEIGHTS,
    ),
    "qlora-no-autocast": (
        {"method": "qlora", "task": "sft", "precision": "bf16_pure"},
        FROZEN + FLASH + 4 * INPUTS + 28 * R,
        0,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_second_layer_keeps_what_the_code_says(name: str) -> None:
    changes, per_token, casts = BY_HAND[name]
    trace = trace_step(config(length=TOKENS, **changes), llama())
    assert trace.layer_saved_bytes == per_token * TOKENS + RANDOM_STATE
    assert trace.layer_cast_bytes == casts


def test_mask_repeats_keys_and_keeps_a_bias() -> None:
    length = 128
    trace = trace_step(config(length=length, batch=2, mask=True, precision="bf16_pure"), llama())
    per_token = 16 * H + 8 * F + 8 + 8 * Q + 4 * N + 2 * length
    assert trace.layer_saved_bytes == per_token * 2 * length + 16


def test_eager_keeps_three_score_matrices() -> None:
    trace = trace_step(config(length=TOKENS, attention="eager", precision="bf16_pure"), llama())
    assert trace.layer_saved_bytes == (16 * H + 8 * F + 8 + 8 * Q + 6 * N * TOKENS) * TOKENS


def test_checkpointed_layer_keeps_its_input_only() -> None:
    trace = trace_step(config(length=TOKENS, checkpoint_every=1, precision="bf16_pure"), llama())
    assert trace.layer_saved_bytes == 2 * H * TOKENS


def test_head_norms_of_qwen3_keep_their_inputs() -> None:
    settings = config(length=TOKENS, precision="bf16_pure")
    plain, normed = trace_step(settings, llama()), trace_step(settings, llama(model_type="qwen3"))
    assert normed.layer_saved_bytes - plain.layer_saved_bytes == (6 * (Q + K) + 4 * (N + KV)) * TOKENS


def test_window_shorter_than_the_sequence_takes_the_mask_path() -> None:
    settings = config(length=TOKENS, precision="bf16_pure")
    windowed = trace_step(settings, llama(model_type="mistral", sliding_window=TOKENS // 2))
    open_window = trace_step(settings, llama(model_type="mistral", sliding_window=TOKENS * 2))
    assert open_window.layer_saved_bytes == trace_step(settings, llama()).layer_saved_bytes
    assert windowed.layer_saved_bytes - open_window.layer_saved_bytes == (4 * Q - 4 * K + 2 * TOKENS) * TOKENS - 8
