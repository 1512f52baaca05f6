"""A simulation of PyTorch's caching allocator: which segments a sequence of allocations makes it hold.

Source: torch 2.13.0, c10/cuda/CUDACachingAllocator.cpp: round_size, get_pool, get_allocation_size, get_free_block,
    should_split, free_block and try_merge_blocks, release_cached_blocks; without expandable segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memc.units import MIB, round_up

_SMALL_BYTES = MIB
_SMALL_SEGMENT_BYTES = 2 * MIB
_MEDIUM_BYTES = 10 * MIB
_MEDIUM_SEGMENT_BYTES = 20 * MIB
_SEGMENT_ROUND_BYTES = 2 * MIB
_ROUND_BYTES = 512


class Block:
    """A piece of a segment.

    Attributes:
        stream: Stream whose pool it belongs to.
        small: Whether that is the pool of requests up to 1 MiB.
        size: Bytes.
        segment: Number of its segment.
        previous, following: Neighbours in the segment.
        free: Whether nothing lies in it.
    """

    __slots__ = ("following", "free", "number", "previous", "segment", "size", "small", "stream")

    def __init__(self, number: int, stream: int, small: bool, size: int, segment: int) -> None:
        self.number, self.stream, self.small, self.size, self.segment = number, stream, small, size, segment
        self.previous: Block | None = None
        self.following: Block | None = None
        self.free = False


class CachingAllocator:
    """What the allocator holds while a program allocates and frees.

    Attributes:
        allocated_bytes, reserved_bytes: What lies in blocks now, and what all segments hold.
        peak_allocated_bytes, peak_reserved_bytes: The largest of each so far.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._capacity = capacity_bytes
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        self._blocks: dict[int, Block] = {}
        self._numbers = 0

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """Returns a block of at least `size_bytes`: the smallest free one of the stream's pool, else a new segment."""
        size = max(_ROUND_BYTES, round_up(size_bytes, _ROUND_BYTES))
        small = size <= _SMALL_BYTES
        pool = self._free.setdefault((stream, small), [])
        at = bisect_left(pool, (size, 0))
        block = self._blocks[pool.pop(at)[1]] if at < len(pool) else self._segment(size, stream, small)
        block.free = False
        if block.size - size >= (_ROUND_BYTES if small else _SMALL_BYTES + 1):
            self._split(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Gives a block back; it grows together with free neighbours of its segment."""
        self.allocated_bytes -= block.size
        for neighbour in (block.previous, block.following):
            if neighbour is not None and neighbour.free:
                self._take_out(neighbour)
                block = self._merge(block, neighbour)
        block.free = True
        insort(self._free.setdefault((block.stream, block.small), []), (block.size, block.number))

    def release_cached(self) -> None:
        """Returns segments in which nothing lies to the device, as after a failed allocation."""
        for pool in self._free.values():
            for _, number in list(pool):
                block = self._blocks[number]
                if block.previous is None and block.following is None:
                    self._take_out(block)
                    self.reserved_bytes -= block.size
                    del self._blocks[number]

    def _segment(self, size: int, stream: int, small: bool) -> Block:
        if small:
            made = _SMALL_SEGMENT_BYTES
        elif size < _MEDIUM_BYTES:
            made = _MEDIUM_SEGMENT_BYTES
        else:
            made = round_up(size, _SEGMENT_ROUND_BYTES)
        if self._capacity is not None and self.reserved_bytes + made > self._capacity:
            self.release_cached()
        self.reserved_bytes += made
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._numbers += 1
        return self._add(Block(self._numbers, stream, small, made, self._numbers))

    def _add(self, block: Block) -> Block:
        self._blocks[block.number] = block
        return block

    def _split(self, block: Block, size: int) -> None:
        """Cuts a block to `size` and puts the rest into the pool."""
        self._numbers += 1
        rest = self._add(Block(self._numbers, block.stream, block.small, block.size - size, block.segment))
        rest.previous, rest.following, rest.free = block, block.following, True
        if rest.following is not None:
            rest.following.previous = rest
        block.following, block.size = rest, size
        insort(self._free.setdefault((rest.stream, rest.small), []), (rest.size, rest.number))

    def _take_out(self, block: Block) -> None:
        pool = self._free[block.stream, block.small]
        del pool[bisect_left(pool, (block.size, block.number))]

    def _merge(self, block: Block, neighbour: Block) -> Block:
        first, second = (neighbour, block) if neighbour is block.previous else (block, neighbour)
        first.size += second.size
        first.following = second.following
        if second.following is not None:
            second.following.previous = first
        del self._blocks[second.number]
        return first
