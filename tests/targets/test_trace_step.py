"""What a step trace says of accounts, time order and depth."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import pytest
from trace_cases import config, llama, tiny

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from memc.ledger.entries import Account
from memc.trace import Instant, Share, trace_step
from memc.trace.loop import record_steps
from memc.trace.peaks import peaks_by_instant
from memc.trace.records import Recording
from memc.units import round_up

PARAMS = 2 * 1003 * 672 + 672 + 3 * (2 * 672 * 576 + 2 * 672 * 192 + 3 * 672 * 1600 + 2 * 672)
BLOCKS = 30 * 512

DEEP: dict[str, tuple[int, dict[str, Any]]] = {
    "full-bf16-weights": (11, {"precision": "bf16_pure"}),
    "full-autocast-foreach": (9, {"optimizer": "adamw_torch"}),
    "checkpointed": (9, {"checkpoint_every": 1}),
    "every-second-layer": (13, {"checkpoint_every": 2, "task": "sft"}),
    "lora-accumulation": (9, {"method": "lora", "task": "sft", "accumulation": 4, "dropout": 0.1}),
    "qlora": (9, {"method": "qlora", "task": "sft", "checkpoint_every": 1}),
}


def _stream(record: Recording) -> list[Any]:
    """Returns allocations in order; releases in a row are a set, because a hash map of caches has no order."""
    events = [(event.delta, event.stage_index, record.blocks[event.block].size_bytes) for event in record.events]
    runs = groupby(events, key=lambda event: event[:2])
    return [(key, sorted(run) if key[0] < 0 else list(run)) for key, run in runs]


@pytest.mark.parametrize("name", DEEP)
def test_copied_layers_and_steps_equal_those_that_run(name: str) -> None:
    layers, changes = DEEP[name]
    settings, model = config(length=64, **changes), llama(num_hidden_layers=layers)
    copied = record_steps(settings, model)
    run = record_steps(settings, model, shallow=False, warm_up=True)
    assert copied.stacks[-1].traced_layers < layers == run.stacks[-1].traced_layers
    assert _stream(copied.recording) == _stream(run.recording)
    assert peaks_by_instant(copied.recording) == peaks_by_instant(run.recording)


@pytest.mark.parametrize(
    ("precision", "weight", "gradient", "states"), [("bf16_pure", 2, 2, 4), ("bf16", 4, 4, 8), ("fp32", 4, 4, 8)]
)
def test_bytes_per_parameter_at_the_step(precision: str, weight: int, gradient: int, states: int) -> None:
    accounts = trace_step(config(precision=precision), llama()).by_account(Instant.STEP)
    assert accounts[Account.PARAMETERS] == pytest.approx(weight * PARAMS, abs=BLOCKS)
    assert accounts[Account.GRADIENTS] == pytest.approx(gradient * PARAMS, abs=BLOCKS)
    assert accounts[Account.OPTIMIZER_STATES] == pytest.approx(states * PARAMS, abs=3 * BLOCKS)


def test_foreach_optimizer_peaks_one_parameter_set_above_fused() -> None:
    fused, foreach = (trace_step(config(optimizer=name), llama()) for name in ("adamw_torch_fused", "adamw_torch"))
    above = foreach.peaks[Instant.STEP].allocated_bytes - fused.peaks[Instant.STEP].allocated_bytes
    assert above == pytest.approx(4 * PARAMS, rel=0.001)


def test_eight_bit_states_take_two_bytes_and_constants_but_eight_for_embeddings() -> None:
    states = trace_step(config(optimizer="adamw_8bit"), llama()).peaks[Instant.STEP].shares[Share.OPTIMIZER_STATES]
    embedding = 1003 * 672
    assert states == pytest.approx((2 + 8 / 256) * (PARAMS - embedding) + 8 * embedding, rel=0.002)


def test_checkpointing_does_not_shorten_the_life_of_weight_casts_in_forward() -> None:
    plain, checkpointed = (trace_step(config(task="sft", checkpoint_every=k), llama()) for k in (0, 1))
    casts = [trace.peaks[Instant.LOSS_FORWARD].shares[Share.WEIGHT_CASTS] for trace in (plain, checkpointed)]
    assert casts[0] == casts[1] > 0


def test_plain_loss_peaks_at_twelve_bytes_per_logit() -> None:
    vocabulary, tokens = 50_000, 512
    trace = trace_step(config(length=tokens, precision="bf16_pure"), tiny(vocab_size=vocabulary))
    assert trace.binding_instant is Instant.LOSS_BACKWARD
    logits = trace.peaks[Instant.LOSS_BACKWARD].allocated_bytes - trace.peaks[Instant.FORWARD].allocated_bytes
    assert logits == pytest.approx(12 * vocabulary * tokens, rel=0.01)


def test_accumulated_gradients_live_through_forward() -> None:
    once, twice = (trace_step(config(accumulation=steps), llama()) for steps in (1, 2))
    assert once.peaks[Instant.FORWARD].shares.get(Share.GRADIENTS, 0) == 0
    assert twice.peaks[Instant.FORWARD].shares[Share.GRADIENTS] == pytest.approx(4 * PARAMS, abs=BLOCKS)


def test_tied_head_holds_two_gradients_of_the_embedding() -> None:
    model = llama(tie_word_embeddings=True, vocab_size=60_000)
    trace = trace_step(config(length=64), model)
    embedding = 4 * 60_000 * 672
    accounts = trace.peaks[Instant.BACKWARD_EMBEDDING].shares
    assert trace.binding_instant is Instant.BACKWARD_EMBEDDING
    assert accounts[Share.WORKING] == pytest.approx(embedding, rel=0.01)


def _rounded(tensors: Iterable[torch.Tensor]) -> int:
    return sum(round_up(tensor.nbytes, 512) for tensor in tensors)


def test_four_bit_weights_take_what_bitsandbytes_stores() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    shapes = {"q": (576, 672), "k": (192, 672), "v": (192, 672), "o": (672, 576)}
    shapes |= {"gate": (1600, 672), "up": (1600, 672), "down": (672, 1600)}
    stored = 0
    for rows, columns in shapes.values():
        packed, state = functional.quantize_4bit(torch.randn(rows, columns), quant_type="nf4", compress_statistics=True)
        nested = state.state2
        stored += _rounded([packed, state.absmax, state.code, state.offset, nested.absmax, nested.code])
        stored += _rounded([torch.empty(16, columns), torch.empty(rows, 16)])
    norms = _rounded([torch.empty(672, dtype=torch.bfloat16)] * 2)
    settings = config(method="qlora", task="sft")
    shares = [trace_step(settings, llama(num_hidden_layers=n)).peaks[Instant.STEP].shares for n in (3, 4)]
    assert shares[1][Share.PARAMETERS] - shares[0][Share.PARAMETERS] == stored + norms
