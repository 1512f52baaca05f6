"""What a card's memory was for at the run's peak: a snapshot's history, undone from its end back to the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from memc.diagnose.pickles import plain_value
from memc.diagnose.snapshot import attributed, no_snapshot, records
from memc.units import format_gib
from memc.verify.attribution import Attribution

_SHOWN_FRAMES = 5
_NO_FRAMES: list[Any] = []  # one object: places are remembered by identity
_Live = dict[int, tuple[int, list[Any]]]
"""Address → (bytes that were asked for, frames of the allocation) of blocks in use."""


def attribution(data: bytes) -> Attribution:
    """Returns what a snapshot's memory was for: when an allocation failed, else at the peak of its history.

    Without a history, as it was when the snapshot was taken.

    Raises:
        MemcError: When the file is no plain pickle, or no snapshot.

    Source: github.com/pytorch/pytorch c10/cuda/CUDACachingAllocator.cpp: memory counts as allocated from `alloc` to
        `free_requested`, and both carry the size that was asked for.
    """
    snapshot = plain_value(data)
    segments = snapshot.get("segments") if isinstance(snapshot, dict) else None
    if not isinstance(segments, list):
        raise no_snapshot("it has no list of segments")
    device = _fullest(segments)
    live = _live(segments, device)
    traces = snapshot.get("device_traces")
    trace = list(records(traces[device])) if isinstance(traces, list) and device < len(traces) else []
    failed = next((_size(entry) for entry in reversed(trace) if entry.get("action") == "oom"), 0)
    if not failed and trace:
        live = _at_peak(live, trace)
    return _summed(live, "failure" if failed else "peak" if trace else "end", failed)


def _fullest(segments: list[Any]) -> int:
    """Returns the card on which most memory is reserved: the process's own."""
    reserved: Counter[int] = Counter()
    for segment in records(segments):
        reserved[int(segment.get("device") or 0)] += int(segment.get("total_size") or 0)
    return max(reserved, key=lambda device: reserved[device], default=0)


def _live(segments: list[Any], device: int) -> _Live:
    """Returns the blocks in use at the end."""
    live: _Live = {}
    for segment in records(segments):
        if int(segment.get("device") or 0) != device:
            continue
        address = int(segment.get("address") or 0)
        for block in records(segment.get("blocks")):
            size = int(block.get("size") or 0)
            if block.get("state") == "active_allocated":
                frames = block.get("frames")
                asked = int(block.get("requested_size") or size)
                live[int(block.get("address") or address)] = (asked, frames if isinstance(frames, list) else _NO_FRAMES)
            address += size
    return live


def _at_peak(live: _Live, trace: list[dict[str, Any]]) -> _Live:
    """Returns the blocks in use after the entry of the history at which most was in use."""
    peak = _peak_index(sum(size for size, _ in live.values()), trace)
    live = dict(live)
    for entry in reversed(trace[peak + 1 :]):
        address = int(entry.get("addr") or 0)
        if entry.get("action") == "alloc":
            live.pop(address, None)
        elif entry.get("action") == "free_requested":
            live[address] = (_size(entry), _NO_FRAMES)
    # Those that were freed later are known by their size alone; what they were for stands where they were allocated.
    unknown = {address for address, (_, frames) in live.items() if frames is _NO_FRAMES}
    for entry in reversed(trace[: peak + 1]):
        address = int(entry.get("addr") or 0)
        if entry.get("action") == "alloc" and address in unknown:
            unknown.discard(address)
            frames = entry.get("frames")
            live[address] = (live[address][0], frames if isinstance(frames, list) else _NO_FRAMES)
    return live


def _peak_index(at_end: int, trace: list[dict[str, Any]]) -> int:
    """Returns the entry after which most was in use; −1: before the first."""
    best, best_index, total = at_end, len(trace) - 1, at_end
    for index in range(len(trace) - 1, -1, -1):
        total -= _change(trace[index])
        if total > best:
            best, best_index = total, index - 1
    return best_index


def _change(entry: dict[str, Any]) -> int:
    sign = {"alloc": 1, "free_requested": -1}.get(str(entry.get("action")), 0)
    return sign * _size(entry)


def _size(entry: dict[str, Any]) -> int:
    size = entry.get("size")
    return size if isinstance(size, int) and 0 <= size < 1 << 60 else 0


def _summed(live: _Live, moment: str, failed: int) -> Attribution:
    accounts: Counter[str] = Counter()
    places: Counter[str] = Counter()
    known: dict[int, tuple[str, str]] = {}
    for size, frames in live.values():
        place = known.get(id(frames))
        if place is None:
            place = known[id(frames)] = attributed(list(records(frames)))
        accounts[place[0]] += size
        places[place[1]] += size
    return Attribution(
        moment=moment,
        accounts=dict(accounts.most_common()),
        allocated_bytes=accounts.total(),
        failed_bytes=failed,
        frames=tuple(_shown(places)),
    )


def _shown(places: Counter[str]) -> Iterator[str]:
    for frame, size in places.most_common(_SHOWN_FRAMES):
        yield "".join(char if char.isprintable() else " " for char in f"{format_gib(size)}  {frame}")[:240]
