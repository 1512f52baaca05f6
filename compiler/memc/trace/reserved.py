"""What the caching allocator reserves for a recorded run: an expectation, and a band for what the record cannot fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from memc.trace.allocator import CachingAllocator, OutOfMemoryError
from memc.trace.records import Block, Event, Owner, Part, Recording, Region, Stage
from memc.units import KIB, MIB

_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm", "aten.convolution")
_WORKSPACE = Block(0, "cublas workspace", 0, Region(Part.BELOW), "")


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Returns the workspace of one cuBLAS handle; torch keeps one per thread that multiplies.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize (`:4096:2:16:8`, 32 MiB from Hopper on).
    """
    return 32 * MIB if compute_capability[0] >= 9 else (2 * 4096 + 8 * 16) * KIB


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """What torch's allocator holds over a run, from its first step on, in bytes.

    Attributes:
        allocated_bytes: Peak of allocated blocks, cuBLAS workspaces and unsplit remainders included.
        workspace_bytes: The cuBLAS workspaces in it.
        expected_bytes: Peak reserved when blocks come in the recorded order.
        low_bytes: Smallest peak reserved over the orders that were tried.
        high_bytes: Largest peak reserved over the orders that were tried.
        expandable_segments: Which allocator it is of.
    """

    allocated_bytes: int
    workspace_bytes: int
    expected_bytes: int
    low_bytes: int
    high_bytes: int
    expandable_segments: bool


def reserved(
    record: Recording, *, expandable_segments: bool, workspace_bytes: int, capacity_bytes: int | None = None
) -> Reserved:
    """Returns what the allocator reserves.

    Assumes: one stream. What the record cannot fix is varied for the band: when cuBLAS workspaces come, whether the
        kernels' own buffers come at all, and one more step.
    Source: the simulation in `memc.trace.allocator`.

    Args:
        record: The run.
        expandable_segments: Which allocator.
        workspace_bytes: Of one cuBLAS handle.
        capacity_bytes: What the allocator can have on the card: short of more, it gives back what lies in no block. A
            run that does not fit even so counts as without a limit. None for no limit.
    """
    after, before = with_workspaces(record, workspace_bytes), with_workspaces(record, workspace_bytes, early=True)
    again = partial(_within, expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
    allocator = again(after)
    allocated, expected = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
    try:
        _repeat_last_step(allocator, after)
    except OutOfMemoryError:
        allocator = replay(after, expandable_segments=expandable_segments, more_steps=1)
    others = [again(before), again(after, leave_out=_is_kernel_buffer(after)), allocator]
    peaks = [expected, *(other.peak_reserved_bytes for other in others)]
    return Reserved(
        allocated_bytes=allocated,
        workspace_bytes=sum(block.size_bytes for block in after.blocks if block.operator == _WORKSPACE.operator),
        expected_bytes=expected,
        low_bytes=min(peaks),
        high_bytes=max(peaks),
        expandable_segments=expandable_segments,
    )


def _within(record: Recording, *, capacity_bytes: int | None, **how: Any) -> CachingAllocator:
    """Returns the allocator after a record, with a limit where it fits in it."""
    try:
        return replay(record, capacity_bytes=capacity_bytes, **how)
    except OutOfMemoryError:
        return replay(record, **how)


def _is_kernel_buffer(record: Recording) -> Callable[[int], bool]:
    def buffer(block: int) -> bool:
        passing = record.blocks[block].operator != _WORKSPACE.operator
        return passing and record.owners.get(block) is Owner.KERNEL_WORKSPACE

    return buffer


def with_workspaces(record: Recording, workspace_bytes: int, *, early: bool = False) -> Recording:
    """Returns the record with the workspaces that the forward's thread and autograd's thread make and keep.

    Each comes with the first matrix product of its thread: after its output, or before it with `early`.
    """
    blocks, owners, events = list(record.blocks), dict(record.owners), []
    waiting = {Stage.FORWARD, Stage.BACKWARD}
    for event in record.events:
        if not waiting:
            events.append(event)
            continue
        stage = record.stages[event.stage_index]
        multiplies = event.delta > 0 and record.blocks[event.block].operator.startswith(_PRODUCTS)
        if stage in waiting and multiplies and workspace_bytes:
            waiting.discard(stage)
            blocks.append(replace(_WORKSPACE, size_bytes=workspace_bytes, stage_index=event.stage_index))
            owners[len(blocks) - 1] = Owner.KERNEL_WORKSPACE
            made = Event(len(blocks) - 1, 1, event.stage_index, event.region, event.module)
            events += [made, event] if early else [event, made]
        else:
            events.append(event)
    return Recording(blocks, events, record.stages, owners, record.lists)


def replay(
    record: Recording,
    *,
    expandable_segments: bool = False,
    capacity_bytes: int | None = None,
    leave_out: Callable[[int], bool] | None = None,
    more_steps: int = 0,
) -> CachingAllocator:
    """Returns the allocator after all events of a record, and after `more_steps` more of its last step.

    Raises:
        OutOfMemoryError: When they do not fit in `capacity_bytes`.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
    events = record.events if leave_out is None else [event for event in record.events if not leave_out(event.block)]
    _play(allocator, events, record.blocks)
    for _ in range(more_steps):
        _repeat_last_step(allocator, record)
    return allocator


def _play(allocator: CachingAllocator, events: Iterable[Event], blocks: Sequence[Block]) -> None:
    allocate, release = allocator.allocate, allocator.release
    for block, delta, *_ in events:
        if delta > 0:
            allocate(block, blocks[block].size_bytes)
        else:
            release(block)


def _repeat_last_step(allocator: CachingAllocator, record: Recording) -> None:
    """Runs the last step of a record once more, without what it leaves behind."""
    steps = [index for index, stage in enumerate(record.stages) if stage is Stage.STEP]
    again = [event for event in record.events if event.stage_index > steps[-2]]
    kept = {event.block for event in again if event.delta > 0} - {event.block for event in again if event.delta < 0}
    _play(allocator, (event for event in again if event.block not in kept), record.blocks)
