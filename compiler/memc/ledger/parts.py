"""Parts: groups of entries that depend on few settings, so that a whole ladder reuses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memc.ledger.entries import ALLOCATOR, BACKWARD_END, PASS, Account, Entry, Moment, Resource
from memc.ledger.holes import embedding_hole_bytes, pieces_of, step_hole_bytes

MOMENTS = tuple(Moment)
ALWAYS = frozenset(MOMENTS)
TRAINING = frozenset(
    {
        Moment.FORWARD,
        Moment.LOSS,
        Moment.BACKWARD_FIRST_LAYER,
        Moment.BACKWARD_LAST_LAYER,
        Moment.BACKWARD_EMBEDDING,
        Moment.STEP,
    }
)
AFTER_LOAD = ALWAYS - {Moment.LOAD}
BACKWARD = frozenset({Moment.BACKWARD_FIRST_LAYER, Moment.BACKWARD_LAST_LAYER, Moment.BACKWARD_EMBEDDING})


class Part:
    """Entries with their sums by moment, computed once.

    Attributes:
        gpu: Bytes that torch's allocator holds on the GPU at each of `MOMENTS`.
        host: Bytes on the host at each of `MOMENTS`.
        nvme: Bytes on the node's drive at each of `MOMENTS`.
        gpu_outside: Bytes the card must have beyond those.
        off_gpu: Whether anything of it lies on the host or on a drive.
        pieces: What of it the step allocates in one piece each; None when nothing.
    """

    __slots__ = ("_entries", "_later", "gpu", "gpu_outside", "host", "nvme", "off_gpu", "pieces")

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: tuple[Entry, ...] | None = tuple([entry for entry in entries if entry.bytes])
        self._later: Callable[[], Iterable[Entry]] | None = None
        sums = {resource: [0] * len(MOMENTS) for resource in Resource}
        outside = 0
        for entry in self._entries:
            if entry.resource is Resource.GPU and not entry.in_allocator and not entry.is_cached:
                outside += entry.bytes
                continue
            own, moments = sums[entry.resource], entry.moments
            for index, moment in enumerate(MOMENTS):
                if moment in moments:
                    own[index] += entry.bytes
        self.gpu, self.host = tuple(sums[Resource.GPU]), tuple(sums[Resource.HOST])
        self.nvme, self.gpu_outside = tuple(sums[Resource.NVME]), outside
        self.off_gpu = any(self.host) or any(self.nvme)
        self.pieces = pieces_of([(entry.name, entry.bytes) for entry in self._entries])

    @classmethod
    def of_sums(cls, gpu: tuple[int, ...], later: Callable[[], Iterable[Entry]]) -> Part:
        """Returns a part of allocated GPU memory whose sums are known and whose entries few will ask for.

        Args:
            gpu: Bytes at each of `MOMENTS`.
            later: Returns the entries, of which these are the sums.
        """
        part = cls(())
        part._entries, part._later, part.gpu = None, later, gpu
        return part

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Those of more than 0 bytes."""
        if self._entries is None:
            assert self._later is not None
            self._entries, self._later = tuple(self._later()), None
        return self._entries


_STEP = MOMENTS.index(Moment.STEP)
_PASS = tuple([MOMENTS.index(moment) for moment in PASS])
_BACKWARD_END = tuple([MOMENTS.index(moment) for moment in BACKWARD_END])


def held_bytes(parts: Sequence[Part]) -> int:
    """Returns what torch's allocator holds at its largest moment with these parts and the holes that pieces leave.

    Source: `memc.ledger.holes`.
    """
    sums = list(map(sum, zip(*[part.gpu for part in parts], strict=True)))
    for part in parts:
        if part.pieces is not None:
            before = max([sums[index] for index in _PASS[:-1]])
            sums[_PASS[-1]] += embedding_hole_bytes(before, sums[_PASS[-1]], part.pieces)
            most, late = (max([sums[index] for index in moments]) for moments in (_PASS, _BACKWARD_END))
            sums[_STEP] += step_hole_bytes(most, late, sums[_STEP], part.pieces)
    return max(sums)


def gpu_entry(
    name: str,
    account: Account,
    size_bytes: int,
    moments: frozenset[Moment],
    formula: str,
    source: str,
) -> Entry:
    """Returns an entry of allocated GPU memory."""
    return Entry(
        name=name,
        account=account,
        resource=Resource.GPU,
        bytes=size_bytes,
        moments=moments,
        formula=formula,
        source=source,
    )


def cached_entry(
    name: str, account: Account, size_bytes: int, moments: frozenset[Moment], formula: str, source: str
) -> Entry:
    """Returns an entry of what the allocator holds on the GPU without a tensor in it, named ``allocator-...``."""
    return Entry(
        name=name if name.startswith(ALLOCATOR) else ALLOCATOR + name,
        account=account,
        resource=Resource.GPU,
        bytes=size_bytes,
        moments=moments,
        formula=formula,
        source=source,
        in_allocator=False,
    )


def host_entry(
    name: str,
    account: Account,
    size_bytes: int,
    moments: frozenset[Moment],
    formula: str,
    source: str,
) -> Entry:
    """Returns an entry of host memory, all ranks of one node together."""
    return Entry(
        name=name,
        account=account,
        resource=Resource.HOST,
        bytes=size_bytes,
        moments=moments,
        formula=formula,
        source=source,
    )
