"""The simulated caching allocator: sequences worked out by hand, laws, and figures of CUDA's own counters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

from memc.trace.allocator import CachingAllocator, OutOfMemoryError
from memc.units import MIB

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 80 * MIB))
SCRIPT = st.lists(st.tuples(st.booleans(), SIZES), max_size=80)


def _run(script: list[tuple[bool, int]], allocator: CachingAllocator) -> list[tuple[int, int]]:
    """Runs a script of allocations and releases (of the oldest block); returns (asked, reserved) after every move."""
    alive: list[tuple[int, int]] = []
    seen = []
    for name, (release, size) in enumerate(script):
        if release and alive:
            allocator.release(alive.pop(0)[0])
        else:
            allocator.allocate(name, size)
            alive.append((name, size))
        seen.append((sum(size for _, size in alive), allocator.reserved_bytes))
        assert allocator.allocated_bytes >= seen[-1][0]
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for name, _ in alive:
        allocator.release(name)
    return seen


@settings(max_examples=150, deadline=None)
@given(SCRIPT, st.booleans())
def test_never_reserves_less_than_it_hands_out_and_takes_everything_back(
    script: list[tuple[bool, int]], expandable: bool
) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    _run(script, allocator)
    assert allocator.allocated_bytes == 0
    peak = allocator.peak_reserved_bytes
    _run(script, allocator)
    assert allocator.peak_reserved_bytes >= peak >= allocator.peak_allocated_bytes


@settings(max_examples=100, deadline=None)
@given(SCRIPT)
def test_a_capacity_changes_nothing_until_it_binds(script: list[tuple[bool, int]]) -> None:
    for expandable in (False, True):
        free = CachingAllocator(expandable_segments=expandable)
        seen = _run(script, free)
        bound = CachingAllocator(expandable_segments=expandable, capacity_bytes=free.peak_reserved_bytes)
        assert _run(script, bound) == seen
        assert bound.retries == 0


def test_blocks_are_multiples_of_512_bytes_in_segments_of_2_mib() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 1)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512, 2 * MIB)
    allocator.allocate(2, 513)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (1536, 2 * MIB)


@pytest.mark.parametrize(
    ("size", "segment"),
    [(MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB), (11 * MIB, 12 * MIB)],
)
def test_segments_by_size(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, size)
    assert allocator.reserved_bytes == segment


@pytest.mark.parametrize(("size", "block"), [(11 * MIB, 12 * MIB), (11 * MIB - 512, 11 * MIB - 512)])
def test_a_remainder_of_up_to_one_mib_stays_in_a_large_block(size: int, block: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (block, 12 * MIB)


def test_the_smallest_free_block_that_fits_is_taken_and_neighbours_join() -> None:
    allocator = CachingAllocator()
    for name, size in enumerate((40, 30, 20)):
        allocator.allocate(name, size * MIB)
    for name in (0, 1):
        allocator.release(name)
    allocator.allocate(3, 29 * MIB)
    assert allocator.reserved_bytes == 90 * MIB
    allocator.allocate(4, 40 * MIB)
    assert allocator.reserved_bytes == 90 * MIB
    allocator.allocate(5, 12 * MIB)
    assert allocator.reserved_bytes == 102 * MIB


def test_expandable_segments_grow_where_separate_ones_cannot_join() -> None:
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable_segments=expandable)
        for name in range(4):
            allocator.allocate(name, 20 * MIB)
        for name in range(4):
            allocator.release(name)
        allocator.allocate(9, 80 * MIB)
        reserved[expandable] = allocator.reserved_bytes
    assert reserved == {False: 160 * MIB, True: 80 * MIB}


@pytest.mark.parametrize("expandable", [False, True])
def test_unused_segments_are_given_back_before_giving_up(expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=100 * MIB)
    allocator.allocate(0, MIB)
    allocator.allocate(1, 60 * MIB)
    allocator.release(1)
    allocator.allocate(2, 80 * MIB)
    assert allocator.reserved_bytes == 82 * MIB
    assert allocator.retries == (0 if expandable else 1)
    with pytest.raises(OutOfMemoryError, match="do not fit"):
        allocator.allocate(3, 40 * MIB)
