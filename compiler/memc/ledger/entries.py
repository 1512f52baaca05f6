"""The ledger's records: entries by account, moment, resource; peaks are the largest sum of what is alive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from memc.ledger.holes import HOLES, Pieces, embedding_hole_bytes, pieces_of, step_hole_bytes

ALLOCATOR = "allocator-"
"""Names of entries begin with it for what torch's allocator holds beyond what is allocated, at their moments."""


class Account(StrEnum):
    """The accounts of one step's memory bill."""

    PARAMETERS = "parameters"
    MASTER_WEIGHTS = "master_weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"


class Phase(StrEnum):
    """What the run is doing."""

    LOAD = "load"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    STEP = "step"
    EVALUATE = "evaluate"
    SAVE = "save"
    RESUME = "resume"


class Moment(StrEnum):
    """An instant at which a phase can peak. A phase has one or more; its peak is the largest of them.

    Backward has three candidates. It frees activations while it adds gradients, both layer by layer: what is alive is
    linear in between, so its maximum is at the first or at the last layer it visits, or at the embedding after them.
    """

    LOAD = "load"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD_FIRST_LAYER = "backward_first_layer"
    BACKWARD_LAST_LAYER = "backward_last_layer"
    BACKWARD_EMBEDDING = "backward_embedding"
    STEP = "step"
    EVALUATE = "evaluate"
    SAVE = "save"
    RESUME = "resume"

    @property
    def phase(self) -> Phase:
        """The phase this instant belongs to."""
        return Phase.BACKWARD if self.value.startswith("backward") else Phase(self.value)


class Resource(StrEnum):
    """Where bytes lie."""

    GPU = "gpu"
    HOST = "host"
    NVME = "nvme"


class Grade(StrEnum):
    """How a figure is known."""

    ESTIMATED = "estimated"
    TRACED = "traced"
    REHEARSED = "rehearsed"
    MEASURED = "measured"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One named amount of memory.

    Attributes:
        name: Kebab-case, unique within a ledger and resource, for example ``adam-moments``.
        account: The account it is booked under.
        resource: Where it lies.
        bytes: Size on one GPU; on the host, of all ranks of one node together.
        moments: When it is alive.
        formula: The computation as text, with the numbers in it.
        source: Where the formula comes from.
        grade: How the figure is known.
        in_allocator: Whether it counts as allocated by torch's caching allocator (False: context, reserve).
        uncertainty_bytes: How far it may be off in either direction, with the reason in `uncertainty`.
        uncertainty: What is not known about it; empty when nothing.
    """

    name: str
    account: Account
    resource: Resource
    bytes: int
    moments: frozenset[Moment]
    formula: str
    source: str
    grade: Grade = Grade.ESTIMATED
    in_allocator: bool = True
    uncertainty_bytes: int = 0
    uncertainty: str = ""

    @property
    def is_cached(self) -> bool:
        """Whether torch's allocator holds it without a tensor in it: freed for one use, of no use for another."""
        return not self.in_allocator and self.name.startswith(ALLOCATOR)

    def counts_at(self, moment: Moment) -> bool:
        """Returns whether the card must have it at a moment; at all of them when it lies outside the allocator."""
        return moment in self.moments or not (self.in_allocator or self.is_cached)


@dataclass(frozen=True, kw_only=True)
class ResourceLedger:
    """The entries of one resource and what follows from them.

    Attributes:
        resource: Which one.
        entries: All of them, in account order.
        by_moment: Sum alive at each moment, over entries that count as allocated (all, off the GPU).
        held_by_moment: The same, with what torch's allocator holds then without a tensor in it.
        reserved_above_allocated_bytes: What the allocator holds at its largest moment beyond the allocated peak.
        outside_allocator_bytes: What the card must have beyond reserved (CUDA context, NCCL).
        grade: How the allocated peak is known.
    """

    resource: Resource
    entries: tuple[Entry, ...]
    by_moment: dict[Moment, int] = field(default_factory=dict)
    held_by_moment: dict[Moment, int] = field(default_factory=dict)
    reserved_above_allocated_bytes: int = 0
    outside_allocator_bytes: int = 0
    grade: Grade = Grade.ESTIMATED

    @property
    def binding_moment(self) -> Moment:
        """The moment at which most is held (the earliest of equals); most may be allocated at another."""
        return max(Moment, key=lambda moment: self.held_by_moment[moment])

    @property
    def binding_phase(self) -> Phase:
        """The phase of the peak."""
        return self.binding_moment.phase

    @property
    def peak_allocated_bytes(self) -> int:
        """Largest sum over moments of what is alive then."""
        return max(self.by_moment.values())

    @property
    def peak_reserved_bytes(self) -> int:
        """What the allocator holds at its peak."""
        return self.peak_allocated_bytes + self.reserved_above_allocated_bytes

    @property
    def required_bytes(self) -> int:
        """What the resource must have: reserved plus what lies outside the allocator."""
        return self.peak_reserved_bytes + self.outside_allocator_bytes

    @property
    def uncertainty_bytes(self) -> int:
        """Sum of the named uncertainties of entries alive at the peak."""
        moment = self.binding_moment
        return sum(entry.uncertainty_bytes for entry in self.entries if entry.counts_at(moment))

    def by_phase(self) -> dict[Phase, int]:
        """Returns the allocated peak of each phase."""
        peaks = dict.fromkeys(Phase, 0)
        for moment, size in self.by_moment.items():
            peaks[moment.phase] = max(peaks[moment.phase], size)
        return peaks

    def by_account(self, moment: Moment | None = None) -> dict[Account, int]:
        """Returns bytes by account, alive at `moment` (default: the binding one), outside-allocator ones included."""
        at = self.binding_moment if moment is None else moment
        sums = dict.fromkeys(Account, 0)
        for entry in self.entries:
            if entry.counts_at(at):
                sums[entry.account] += entry.bytes
        return sums


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The bill of one configuration, by resource."""

    gpu: ResourceLedger
    host: ResourceLedger
    nvme: ResourceLedger

    def of(self, resource: Resource) -> ResourceLedger:
        """Returns the ledger of `resource`."""
        return {Resource.GPU: self.gpu, Resource.HOST: self.host, Resource.NVME: self.nvme}[resource]


BACKWARD_END = (Moment.BACKWARD_LAST_LAYER, Moment.BACKWARD_EMBEDDING)
PASS = (Moment.FORWARD, Moment.LOSS, Moment.BACKWARD_FIRST_LAYER, *BACKWARD_END)
"""The moments of forward and backward, and those at the end of backward."""


def resource_ledger(resource: Resource, entries: Iterable[Entry]) -> ResourceLedger:
    """Returns the ledger of one resource, with sums by moment filled in. Entries of 0 bytes are dropped.

    What the step's pieces leave unused depends on all of them, and is added here.
    """
    own = tuple(entry for entry in entries if entry.resource is resource and entry.bytes)
    own = tuple(entry for entry in own if not entry.name.startswith(ALLOCATOR + HOLES))
    pieces = pieces_of([(entry.name, entry.bytes) for entry in own])
    if pieces is not None:
        own = (*own, *_holes(own, pieces))
    order = list(Account)
    own = tuple(sorted(own, key=lambda entry: order.index(entry.account)))
    by_moment = dict.fromkeys(Moment, 0)
    for entry in own:
        if entry.in_allocator:
            for moment in entry.moments:
                by_moment[moment] += entry.bytes
    held = dict(by_moment)
    for entry in own:
        if entry.is_cached:
            for moment in entry.moments:
                held[moment] += entry.bytes
    return ResourceLedger(
        resource=resource,
        entries=own,
        by_moment=by_moment,
        held_by_moment=held,
        reserved_above_allocated_bytes=max(held.values()) - max(by_moment.values()),
        outside_allocator_bytes=sum(entry.bytes for entry in own if not entry.in_allocator and not entry.is_cached),
    )


def _holes(entries: tuple[Entry, ...], pieces: Pieces) -> Iterable[Entry]:
    """Returns the entries for what pieces leave unused; nothing where that is 0 bytes."""
    held = dict.fromkeys((*PASS, Moment.STEP), 0)
    for entry in entries:
        if entry.in_allocator or entry.is_cached:
            for moment in held:
                held[moment] += entry.bytes if moment in entry.moments else 0
    embedding = embedding_hole_bytes(
        max(size for moment, size in held.items() if moment in PASS[:-1]), held[Moment.BACKWARD_EMBEDDING], pieces
    )
    held[Moment.BACKWARD_EMBEDDING] += embedding
    most, late = (max(held[moment] for moment in moments) for moments in (PASS, BACKWARD_END))
    step = step_hole_bytes(most, late, held[Moment.STEP], pieces)
    rows = (
        (f"{HOLES}-at-embedding", embedding, Moment.BACKWARD_EMBEDDING, f"{pieces.embedding} B of its gradient"),
        (f"{HOLES}-at-step", step, Moment.STEP, f"{pieces.flat} B of flat gradients"),
    )
    return [
        Entry(
            name=ALLOCATOR + name,
            account=Account.WORKSPACE,
            resource=Resource.GPU,
            bytes=size,
            moments=frozenset({moment}),
            formula=f"{size} B that the pass held, in parts of no use for {what} in one piece",
            source="torch CUDACachingAllocator.cpp; DeepSpeed stage_1_and_2.py and stage3.py step",
            in_allocator=False,
        )
        for name, size, moment, what in rows
        if size
    ]


def allocated_by_account(bill: ResourceLedger, phase: Phase) -> dict[Account, int]:
    """Returns allocated bytes by account at the largest moment of a phase; they add up to the phase's peak."""
    moment = max((item for item in Moment if item.phase is phase), key=lambda item: bill.by_moment[item])
    sums = dict.fromkeys(Account, 0)
    for entry in bill.entries:
        if entry.in_allocator and moment in entry.moments:
            sums[entry.account] += entry.bytes
    return sums
