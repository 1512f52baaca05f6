"""What the allocator holds beside pieces that find no room, and what streams of their own keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memc.config import Engine, LossHead, Method, Offload, TrainingConfig
from memc.facts import load_gpu, load_model
from memc.ledger import Estimator, Moment, ledger_facts
from memc.ledger.entries import ResourceLedger
from memc.ledger.holes import CUT, PART, SUB_GROUP, TIGHT, WHOLE, Pieces, embedding_hole_bytes, step_hole_bytes
from planmaker import make_config, make_zero

SIZES = st.integers(0, 2**40)
LENGTHS = (1024, 2048, 4096, 8192)
KINDS = st.sampled_from((WHOLE, CUT, TIGHT, PART, SUB_GROUP))


def configuration(stage: int, ranks: int = 2, loss: LossHead = LossHead.PLAIN, **changes: object) -> TrainingConfig:
    return replace(
        make_config(method=Method.FULL),
        engine=Engine.DEEPSPEED,
        zero=make_zero(stage, **changes),
        gpus_per_node=ranks,
        checkpoint_every=1,
        gradient_accumulation_steps=1,
        loss=loss,
    )


def bill(config: TrainingConfig, model: str = "meta-llama/Llama-3.1-8B") -> ResourceLedger:
    return Estimator(load_model(model, base_dir=Path()), ledger_facts(load_gpu("h200-sxm-141gb"))).ledger(config).gpu


def named(gpu: ResourceLedger, name: str) -> int:
    return sum(entry.bytes for entry in gpu.entries if entry.name == name)


@given(SIZES, SIZES, SIZES, SIZES, KINDS, st.integers(1, 2**30))
def test_more_never_costs_less(most: int, late: int, rest: int, flat: int, kind: str, more: int) -> None:
    pieces = Pieces(0, flat, 3 * flat, kind)
    step = rest + 3 * flat
    held = step_hole_bytes(most, late, step, pieces)
    assert held >= 0
    assert step_hole_bytes(most + more, late + more, step, pieces) >= held
    assert step + more + step_hole_bytes(most, late, step + more, pieces) >= step + held
    assert held <= max(0, max(most, late) - rest)


@given(SIZES, SIZES, SIZES, st.integers(1, 2**30))
def test_the_embeddings_gradient_leaves_no_more_than_itself(before: int, rest: int, size: int, more: int) -> None:
    pieces = Pieces(size, 0, 0, WHOLE)
    hole = embedding_hole_bytes(before, rest + size, pieces)
    assert 0 <= hole <= size
    assert rest + size + hole >= min(before, rest + 2 * size)
    assert embedding_hole_bytes(before + more, rest + size, pieces) >= hole


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("loss", list(LossHead))
def test_prices_and_bills_hold_the_same(stage: int, loss: LossHead) -> None:
    model, facts = load_model("meta-llama/Llama-3.1-8B", base_dir=Path()), ledger_facts(load_gpu("h200-sxm-141gb"))
    for ranks in (2, 8):
        price = Estimator(model, facts).price(configuration(stage, ranks, loss))
        assert price.gpu_reserved_bytes == price.ledger().gpu.peak_reserved_bytes


def test_flat_gradients_that_fit_nowhere_leave_memory_of_the_pass_unused() -> None:
    gpu = bill(configuration(1))
    assert named(gpu, "allocator-holes-at-step") == named(gpu, "step-flat-gradients") > 0
    assert gpu.held_by_moment[Moment.STEP] - gpu.by_moment[Moment.STEP] >= named(gpu, "allocator-holes-at-step")


def test_norms_of_offloaded_gradients_are_taken_in_fp64_on_the_gpu() -> None:
    model = load_model("meta-llama/Llama-3.1-8B", base_dir=Path())
    head = model.head_params
    gpu = bill(configuration(2, 8, offload_optimizer=Offload.CPU))
    assert named(gpu, "gradient-norm-backward-embedding") == 8 * head
    parts = bill(configuration(3, 8, offload_optimizer=Offload.CPU, offload_param=Offload.CPU))
    assert named(parts, "gradient-norm-backward-embedding") == (8 + 2) * head // 8
    pair = bill(configuration(3, 2, offload_optimizer=Offload.CPU, offload_param=Offload.CPU))
    assert named(pair, "gradient-norm-backward-embedding") == 8 * 250_000_000 + 2 * head // 2
    assert named(bill(configuration(2, 8)), "gradient-norm-backward-embedding") == 0


def test_a_head_comes_beside_a_full_window() -> None:
    kept = named(bill(configuration(3, 8)), "allocator-gather-stream")
    head = load_model("meta-llama/Llama-3.1-8B", base_dir=Path()).head_params
    assert kept == 2 * head
    moved = bill(configuration(3, 8, offload_optimizer=Offload.CPU, offload_param=Offload.CPU))
    assert named(moved, "allocator-gather-stream") == 2 * (head + head // 8)
    passes = replace(configuration(3, 8), gradient_accumulation_steps=4)
    assert named(bill(passes), "allocator-gather-stream") == 2 * head
    config = configuration(3, 8, offload_optimizer=Offload.CPU, offload_param=Offload.CPU)
    passes = replace(config, gradient_accumulation_steps=4)
    assert named(bill(passes), "allocator-gather-stream") == 2 * (2 * head + head // 8)
    tied = bill(configuration(3, 8, loss=LossHead.CHUNKED), "microsoft/Phi-4-mini-instruct")
    assert named(tied, "allocator-gather-stream") == 0


@pytest.mark.parametrize(
    ("model", "ranks", "kind"),
    [
        ("meta-llama/Llama-3.2-1B", 2, "step-pair-gradients"),
        ("meta-llama/Llama-3.2-1B", 8, "step-part-gradients"),
        ("meta-llama/Llama-3.1-8B", 2, "step-part-gradients"),
    ],
)
def test_a_norm_in_fp64_that_fits_nowhere_takes_flat_gradients_with_it(model: str, ranks: int, kind: str) -> None:
    assert named(bill(configuration(2, ranks), model), kind) > 0


def adapters(**changes: object) -> TrainingConfig:
    config = replace(make_config(method=Method.LORA), checkpoint_every=1, micro_batch_size=1, max_length=1024)
    return replace(config, loss=LossHead.PLAIN, gradient_accumulation_steps=2, **changes)


def test_what_the_backwards_workspace_cuts_off_is_of_no_use_to_the_next_pass() -> None:
    gemma = load_model("google/gemma-2-2b", base_dir=Path())
    cut = named(bill(adapters(), gemma.key), "allocator-layer-blocks")
    assert cut == 2 * 1024 * (gemma.vocab_size + gemma.hidden_size)
    for other in (
        replace(adapters(), gradient_accumulation_steps=1),
        replace(adapters(), checkpoint_every=0),
        replace(adapters(), loss=LossHead.CHUNKED),
    ):
        assert named(bill(other, gemma.key), "allocator-layer-blocks") < cut


def test_a_workspace_that_has_room_cuts_off_no_more() -> None:
    cuts = [
        named(bill(adapters(max_length=length), "google/gemma-2-2b"), "allocator-layer-blocks") for length in LENGTHS
    ]
    assert cuts == sorted(cuts)
    assert cuts[-1] < cuts[0] * LENGTHS[-1] // LENGTHS[0]
