"""A simulation of PyTorch's caching allocator on one device and one stream.

Source: c10/cuda/CUDACachingAllocator.cpp (round_size, get_allocation_size, get_free_block, should_split, free_block,
    try_allocate_expandable_block, map_block, release_cached_blocks) with default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from memc.units import MIB, ceil_div, round_up

_SMALLEST = 512
_SMALL_LIMIT = 1 * MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT_FROM = 10 * MIB
_OWN_SEGMENT_UNIT = 2 * MIB
_SPLIT_REMAINDER = 1 * MIB
_ADDRESS_SPACE = 1 << 48
_ADDRESS_BITS = 64


class OutOfMemoryError(RuntimeError):
    """A request does not fit in the device's memory, even after unused segments are given back."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """A range of addresses, in use or free, with its neighbours in the same segment."""

    address: int
    size: int
    small: bool
    mapped: bool = True
    used: bool = False
    before: _Chunk | None = None
    after: _Chunk | None = None


class _Pool:
    """The free chunks of one pool, by size and then address in one number, and what its segment has not mapped."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.order: list[int] = []
        self.chunks: dict[int, _Chunk] = {}
        self.unmapped: list[_Chunk] = []

    def add(self, chunk: _Chunk) -> None:
        """Puts a free chunk in."""
        place = chunk.size << _ADDRESS_BITS | chunk.address
        insort(self.order, place)
        self.chunks[place] = chunk

    def take(self, chunk: _Chunk) -> None:
        """Takes a free chunk out."""
        place = chunk.size << _ADDRESS_BITS | chunk.address
        del self.order[bisect_left(self.order, place)]
        del self.chunks[place]

    def best(self, size: int, *, expandable: bool) -> _Chunk | None:
        """Returns the smallest free chunk that holds `size`.

        In an expandable segment a chunk counts as large as it can grow.
        """
        order = self.order
        place = bisect_left(order, size << _ADDRESS_BITS)
        if place == len(order):
            return None
        found = self.chunks[order[place]]
        while expandable and found.after is not None and not found.after.mapped and place + 1 < len(order):
            following = self.chunks[order[place + 1]]
            if _grown(following) >= _grown(found):
                break
            found, place = following, place + 1
        return found


def _grown(chunk: _Chunk) -> int:
    return chunk.size + (chunk.after.size if chunk.after is not None and not chunk.after.mapped else 0)


class CachingAllocator:
    """Hands out blocks and counts what it holds.

    Args:
        expandable_segments: Whether segments grow in place (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`).
        capacity_bytes: What the device can give; None for no limit.

    Attributes:
        allocated_bytes: Sum of blocks in use, remainders that were not split off included.
        reserved_bytes: What the device has given.
        peak_allocated_bytes: Largest `allocated_bytes` so far.
        peak_reserved_bytes: Largest `reserved_bytes` so far.
        retries: How often unused segments had to be given back first.
    """

    def __init__(self, *, expandable_segments: bool = False, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self._expandable = expandable_segments
        self._capacity = capacity_bytes
        self._pools = {True: _Pool(True), False: _Pool(False)}
        self._next_address = _ADDRESS_SPACE
        self._in_use: dict[int, _Chunk] = {}

    def allocate(self, name: int, size_bytes: int) -> None:
        """Gives `name` a block of at least `size_bytes`; nothing for a size of 0.

        Raises:
            OutOfMemoryError: When the device cannot give enough.
        """
        if size_bytes == 0:
            return
        size = -(-size_bytes // _SMALLEST) * _SMALLEST
        pool = self._pools[size <= _SMALL_LIMIT]
        chunk = pool.best(size, expandable=self._expandable)
        if chunk is None:
            chunk = self._grow(pool, size)
        pool.take(chunk)
        remainder = chunk.size - size
        if remainder and (pool.small or self._expandable or remainder > _SPLIT_REMAINDER):
            pool.add(_split(chunk, size))
        chunk.used = True
        self._in_use[name] = chunk
        self.allocated_bytes += chunk.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes

    def release(self, name: int) -> None:
        """Takes the block of `name` back; nothing when it has none."""
        chunk = self._in_use.pop(name, None)
        if chunk is not None:
            chunk.used = False
            self.allocated_bytes -= chunk.size
            self._give_to_pool(chunk)

    def _give_to_pool(self, chunk: _Chunk) -> None:
        """Joins a free chunk with free neighbours and puts it in its pool."""
        pool, before, after = self._pools[chunk.small], chunk.before, chunk.after
        if before is not None and not before.used and before.mapped:
            pool.take(before)
            _join(chunk, before)
        if after is not None and not after.used and after.mapped:
            pool.take(after)
            _join(chunk, after)
        pool.add(chunk)

    def _grow(self, pool: _Pool, size: int) -> _Chunk:
        for attempt in range(2):
            chunk = self._expand(pool, size) if self._expandable else self._new_segment(pool, size)
            if chunk is not None:
                return chunk
            if attempt == 0:
                self.retries += 1
                self._give_back_unused()
        raise OutOfMemoryError(f"{size} bytes do not fit: {self.reserved_bytes} of {self._capacity} are reserved")

    def _reserve(self, size: int) -> bool:
        if self._capacity is not None and self.reserved_bytes + size > self._capacity:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_segment(self, pool: _Pool, size: int) -> _Chunk | None:
        """Returns a free chunk that is a new segment, in its pool."""
        segment = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        if size >= _OWN_SEGMENT_FROM:
            segment = round_up(size, _OWN_SEGMENT_UNIT)
        if not self._reserve(segment):
            return None
        chunk = _Chunk(self._next_address, segment, pool.small)
        self._next_address += segment
        pool.add(chunk)
        return chunk

    def _expand(self, pool: _Pool, size: int) -> _Chunk | None:
        """Returns a free chunk of at least `size` in the pool's expandable segment, in its pool."""
        chunk = next((start for hole in pool.unmapped if (start := _start(hole, size)) is not None), None)
        if chunk is None:
            chunk = _Chunk(self._next_address, _ADDRESS_SPACE, pool.small, mapped=False)
            self._next_address += _ADDRESS_SPACE
            pool.unmapped.append(chunk)
        if not chunk.mapped and not self._map(pool, chunk, min(chunk.size, size)):
            return None
        while chunk.size < size:
            hole = chunk.after
            assert hole is not None
            if not self._map(pool, hole, min(size - chunk.size, hole.size)):
                return None
            chunk = hole
        return chunk

    def _map(self, pool: _Pool, hole: _Chunk, size: int) -> bool:
        """Backs the beginning of an unmapped chunk, in whole granules, and joins it with its neighbours."""
        granule = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        backed = min(round_up(size, granule), hole.size)
        if not self._reserve(backed):
            return False
        pool.unmapped.remove(hole)
        if backed < hole.size:
            rest = _split(hole, backed)
            rest.mapped = False
            pool.unmapped.append(rest)
            pool.unmapped.sort(key=lambda chunk: chunk.address)
        hole.mapped = True
        self._give_to_pool(hole)
        return True

    def _give_back_unused(self) -> None:
        """Returns to the device what lies in no block: whole segments, or whole granules of expandable ones."""
        for pool in self._pools.values():
            for chunk in list(pool.chunks.values()):
                if self._expandable:
                    self._unmap(pool, chunk)
                elif chunk.before is None and chunk.after is None:
                    pool.take(chunk)
                    self.reserved_bytes -= chunk.size

    def _unmap(self, pool: _Pool, chunk: _Chunk) -> None:
        granule = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        base = chunk.address // _ADDRESS_SPACE * _ADDRESS_SPACE
        start = base + ceil_div(chunk.address - base, granule) * granule
        end = base + (chunk.address + chunk.size - base) // granule * granule
        if start >= end:
            return
        pool.take(chunk)
        if end < chunk.address + chunk.size:
            pool.add(_split(chunk, end - chunk.address))
        if start > chunk.address:
            inner = _split(chunk, start - chunk.address)
            pool.add(chunk)
            chunk = inner
        chunk.mapped = False
        self.reserved_bytes -= chunk.size
        for neighbour in (chunk.before, chunk.after):
            if neighbour is not None and not neighbour.mapped:
                pool.unmapped.remove(neighbour)
                _join(chunk, neighbour)
        pool.unmapped.append(chunk)
        pool.unmapped.sort(key=lambda hole: hole.address)


def _start(hole: _Chunk, size: int) -> _Chunk | None:
    """Returns where a run of free or unmapped chunks of at least `size` begins, at a hole or right before it."""
    start = hole.before if hole.before is not None and not hole.before.used else hole
    room = 0
    chunk: _Chunk | None = start
    while chunk is not None and not chunk.used and room < size:
        room += chunk.size
        chunk = chunk.after
    return start if room >= size else None


def _split(chunk: _Chunk, size: int) -> _Chunk:
    """Shortens a chunk to `size` and returns the rest, free, right after it."""
    rest = _Chunk(chunk.address + size, chunk.size - size, chunk.small, chunk.mapped, False, chunk, chunk.after)
    if chunk.after is not None:
        chunk.after.before = rest
    chunk.after, chunk.size = rest, size
    return rest


def _join(chunk: _Chunk, neighbour: _Chunk) -> None:
    """Lets a chunk take the place of its neighbour too."""
    if neighbour is chunk.before:
        chunk.address, chunk.before = neighbour.address, neighbour.before
        if chunk.before is not None:
            chunk.before.after = chunk
    else:
        chunk.after = neighbour.after
        if chunk.after is not None:
            chunk.after.before = chunk
    chunk.size += neighbour.size
