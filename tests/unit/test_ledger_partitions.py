"""What ranks hold of cut gradients, against the cut made element by element; and streams that keep their memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memc.config import Engine, Method, Offload
from memc.facts import load_gpu, load_model
from memc.ledger import Estimator, Moment, ledger_facts
from memc.ledger.entries import ResourceLedger
from memc.ledger.partitions import holdings, largest_sub_group, sub_groups, trained_matrices
from memc.units import ceil_div
from planmaker import make_config, make_zero

MODEL = "meta-llama/Llama-3.1-8B"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 9), st.integers(0, 40))
def test_holdings_are_those_of_a_cut_element_by_element(sizes: list[int], ranks: int, bucket: int) -> None:
    owners = [index for index, size in enumerate(sizes) for _ in range(size)]
    share = ceil_div(len(owners), ranks)
    parts = [sorted({*owners[rank * share : (rank + 1) * share]}) for rank in range(ranks)]
    own = [sum(sizes[index] for index in part) for part in parts if part]
    outside = [
        sum(size for index, size in enumerate(sizes) if size > bucket and index not in part) for part in parts if part
    ]
    found = holdings(tuple(sizes), ranks, bucket)
    assert (found.own, found.last) == (max(own), own[-1])
    lowest = sizes[0] if sizes[0] > bucket else 0
    firsts = [part[0] == 0 for part in parts if part]
    kept = zip(own, outside, firsts, strict=True)
    pairs = [(mine + rest, first) for mine, rest, first in kept]
    assert found.kept == max(size - (0 if first else lowest) for size, first in pairs)
    assert found.kept_with_lowest == max(size + (lowest if first else 0) for size, first in pairs)


def test_a_sub_group_ends_with_the_parameter_that_reaches_its_size() -> None:
    assert largest_sub_group((30, 30, 90, 10), 10, 5) == 9
    assert largest_sub_group((30, 30, 90, 10), 10, 7) == 15
    assert largest_sub_group((30, 30, 90, 10), 10, 100) == 16
    assert sub_groups((30, 30, 90, 10), 10, 5) == (6, 9, 1)
    assert largest_sub_group((), 10, 5) == 0


def test_matrices_come_as_modules_register_them() -> None:
    model = load_model(MODEL, base_dir=Path())
    matrices = trained_matrices(model, make_config(method=Method.FULL))
    assert matrices[0] == matrices[-1] == 128256 * 4096
    assert len(matrices) == 2 + 32 * 7
    assert list(accumulate(matrices))[-1] == model.total_params - 65 * 4096


def bill(stage: int, ranks: int, gpu: str = "h100-sxm5-80gb", **changes: object) -> ResourceLedger:
    zero = make_zero(stage, **changes)
    config = replace(
        make_config(method=Method.FULL), engine=Engine.DEEPSPEED, zero=zero, gpus_per_node=ranks, checkpoint_every=1
    )
    model = load_model(MODEL, base_dir=Path())
    return Estimator(model, ledger_facts(load_gpu(gpu))).ledger(config).gpu


def named(gpu: ResourceLedger, name: str) -> int:
    return sum(entry.bytes for entry in gpu.entries if entry.name == name)


def test_initialisation_copies_what_trains_where_the_card_has_room() -> None:
    model = load_model(MODEL, base_dir=Path())
    two = 2 * model.total_params
    assert bill(2, 8).by_moment[Moment.LOAD] == two + two
    small = bill(2, 8, gpu="rtx-4090")
    assert small.by_moment[Moment.LOAD] == two + 2 * 4 * ceil_div(model.total_params, 8)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stream_of_its_own_keeps_its_memory_while_no_tensor_is_in_it(stage: int) -> None:
    gpu = bill(stage, 8, overlap_comm=True)
    kept = named(gpu, "allocator-reduction-stream")
    assert kept > 0
    assert gpu.peak_reserved_bytes > gpu.peak_allocated_bytes
    assert named(bill(stage, 8, overlap_comm=False), "allocator-reduction-stream") == 0


def test_without_room_on_the_card_the_host_holds_two_copies() -> None:
    model = load_model(MODEL, base_dir=Path())
    config = replace(make_config(method=Method.FULL), engine=Engine.DEEPSPEED, zero=make_zero(2), gpus_per_node=8)
    for gpu, copies in (("h100-sxm5-80gb", 0), ("rtx-4090", 8 * 2 * model.total_params)):
        host = Estimator(model, ledger_facts(load_gpu(gpu))).ledger(config).host
        assert named(host, "flattening-on-host") == copies


def test_offloaded_gradients_leave_nothing_in_a_stream() -> None:
    assert named(bill(2, 8, offload_optimizer=Offload.CPU), "allocator-reduction-stream") == 0


def test_offloaded_parameters_are_pinned_as_a_rehearsal_of_them_was() -> None:
    """Each rank of two held 40.25 GiB pinned: DeepSpeed 0.19.8 with torch 2.13.0 on a phantom card."""
    model, gib = load_model(MODEL, base_dir=Path()), 2**30
    zero = make_zero(3, offload_optimizer=Offload.CPU, offload_param=Offload.CPU, sub_group_elements=10**9)
    config = replace(make_config(method=Method.FULL), engine=Engine.DEEPSPEED, zero=zero, gpus_per_node=2)
    host = Estimator(model, ledger_facts(load_gpu("h100-sxm5-80gb"))).ledger(config).host
    names = ("offloaded-parameters", "parameters-before-flattening", "offloaded-gradients", "offload-16bit-buffer")
    sizes = [sum(entry.bytes for entry in host.entries if entry.name == name) / 2 for name in names]
    assert sizes == [8 * gib, 8.25 * gib, 16 * gib, 8 * gib]
