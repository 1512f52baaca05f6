"""A trace without data allocates and frees what real tensors do, one by one."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from trace_cases import config, tiny

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.trace.loop import record_steps
from memc.trace.records import Recording

CASES: dict[str, dict[str, Any]] = {
    "full-bf16-weights": {"precision": "bf16_pure"},
    "full-autocast": {},
    "full-fp32": {"precision": "fp32"},
    "autocast-checkpointed": {"checkpoint_every": 1},
    "padded-eager": {"attention": "eager", "mask": True, "batch": 2},
    "lora": {"method": "lora"},
    "lora-dropout-accumulation": {"method": "lora", "dropout": 0.1, "accumulation": 2},
    "sft-every-second-layer": {"task": "sft", "checkpoint_every": 2},
    "sft-deepspeed-model": {"task": "sft", "engine": "deepspeed"},
}


def _stream(record: Recording) -> list[Any]:
    """Returns allocations in order; releases in a row are a set, because a hash map of caches has no order."""
    events = [(event.delta, event.stage_index, record.blocks[event.block].size_bytes) for event in record.events]
    runs = groupby(events, key=lambda event: event[:2])
    return [(key, sorted(run) if key[0] < 0 else list(run)) for key, run in runs]


@pytest.mark.parametrize("name", CASES)
def test_tape_without_data_equals_tape_of_real_tensors(name: str) -> None:
    settings = config(length=48, **CASES[name])
    without_data = record_steps(settings, tiny(), like_cuda=False).recording
    real = record_steps(settings, tiny(), like_cuda=False, without_data=False, shallow=False, warm_up=True).recording
    assert len(without_data.events) > 1000
    assert _stream(without_data) == _stream(real)
