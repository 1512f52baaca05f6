"""What a trace of the modelling code found, and the ledger that follows it. No part of this needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memc.ledger.entries import (
    ALLOCATOR,
    Account,
    Entry,
    Grade,
    Ledger,
    Moment,
    Phase,
    Resource,
    ResourceLedger,
    resource_ledger,
)

STEP_PHASES = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.STEP)
_OUTSIDE_TRACE = "cublas"
_DIFFERENCE = "trace-difference"
_HELD = f"{ALLOCATOR}trace-held"


@dataclass(frozen=True, kw_only=True)
class TracedStack:
    """One stack of layers and how many of them were run; the others repeat those."""

    name: str
    layers: int
    traced_layers: int


@dataclass(frozen=True, kw_only=True)
class TracedPhase:
    """The allocated peak of one phase, cuBLAS workspaces left out, and what it is made of."""

    phase: Phase
    allocated_bytes: int
    by_account: dict[Account, int]


@dataclass(frozen=True, kw_only=True)
class TracedReserved:
    """What torch's allocator holds at its peak over the step, cuBLAS workspaces included.

    Attributes:
        expected_bytes: When blocks come as they were recorded.
        low_bytes, high_bytes: Over what a record cannot fix.
    """

    expected_bytes: int
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One optimizer step on one GPU, as the trace saw it.

    Attributes:
        digest: Of the configuration and the model's config.json that were traced.
        tracer: Digest of the trace's own source.
        versions: Library versions that ran.
        phases: Peaks in time order.
        reserved: What the allocator holds.
        stacks: The model's stacks of layers.
        assumes: What was assumed about the batch.
        not_modelled: What a real run allocates and the trace leaves out.
    """

    digest: str
    tracer: str
    versions: dict[str, str]
    phases: tuple[TracedPhase, ...]
    reserved: TracedReserved
    stacks: tuple[TracedStack, ...]
    assumes: tuple[str, ...]
    not_modelled: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PhaseComparison:
    """One phase of a step on both sides, allocated bytes with cuBLAS workspaces in both."""

    phase: Phase
    traced_bytes: int
    ledger_bytes: int

    @property
    def difference_bytes(self) -> int:
        """Trace less ledger."""
        return self.traced_bytes - self.ledger_bytes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A ledger beside a trace of the same configuration.

    Attributes:
        phases: The phases that the trace covers.
        traced_required_bytes: What one card must have when these phases are as traced and the others as estimated:
            what the allocator holds then, and what lies outside it.
        interval_bytes: How far the two peaks may be apart before the closed forms count as wrong.
        held_bytes: What the traced allocator holds beyond what the ledger expects of it; negative when less.
        held_interval_bytes: How far that may be off before it counts.
    """

    phases: tuple[PhaseComparison, ...]
    traced_required_bytes: int
    interval_bytes: int
    held_bytes: int
    held_interval_bytes: int

    @property
    def peak(self) -> PhaseComparison:
        """The phase in which the traced step peaks (the earliest of equals)."""
        return max(self.phases, key=lambda item: item.traced_bytes)

    @property
    def ledger_peak_bytes(self) -> int:
        """The largest of the ledger's peaks in the same phases."""
        return max(item.ledger_bytes for item in self.phases)

    @property
    def difference_bytes(self) -> int:
        """Peak of the traced step less that of the ledger."""
        return self.peak.traced_bytes - self.ledger_peak_bytes

    @property
    def difference_share(self) -> float:
        """The same as a fraction of the ledger's peak."""
        return self.difference_bytes / self.ledger_peak_bytes

    @property
    def agrees(self) -> bool:
        """Whether the two peaks are within their interval."""
        return abs(self.difference_bytes) <= self.interval_bytes


def compare(bill: ResourceLedger, step: TracedStep, interval_share: float) -> Comparison:
    """Returns a GPU's ledger beside the trace of the same configuration.

    Assumes: the trace leaves out cuBLAS workspaces, which are added to it as the ledger counts them.

    Args:
        bill: The ledger.
        step: The trace.
        interval_share: The part of the ledger's peak by which the closed forms may be off; named uncertainties of
            entries that are alive then come on top.
    """
    plain = without_trace(bill)
    traced = {item.phase: item.allocated_bytes for item in step.phases}
    phases = []
    for phase in STEP_PHASES:
        if phase in traced:
            moment = _largest_moment(plain, phase)
            added = _outside_bytes(plain, moment)
            phases.append(
                PhaseComparison(phase=phase, traced_bytes=traced[phase] + added, ledger_bytes=plain.by_moment[moment])
            )
    covered = {item.phase for item in phases}
    others = [size for moment, size in plain.by_moment.items() if moment.phase not in covered]
    allocated = max([item.traced_bytes for item in phases] + others)
    peak = max(phases, key=lambda item: item.ledger_bytes)
    named = _uncertainty_bytes(plain, _largest_moment(plain, peak.phase))
    held = step.reserved.expected_bytes - allocated - plain.reserved_above_allocated_bytes
    # A segment, whatever the closed forms do not know of holes: the replay knows the order of allocations.
    allowed = sum(entry.bytes for entry in plain.entries if entry.is_cached and len(entry.moments) == len(Moment))
    if max(item.traced_bytes for item in phases) < allocated:
        held = max(held, -allowed)  # the replay has no evaluation and no saving: it cannot say that those hold less
    expected = allocated + plain.required_bytes - plain.peak_allocated_bytes
    return Comparison(
        phases=tuple(phases),
        traced_required_bytes=expected + (held if abs(held) > allowed else 0),
        interval_bytes=named + int(interval_share * peak.ledger_bytes),
        held_bytes=held,
        held_interval_bytes=allowed,
    )


def with_trace(ledger: Ledger, step: TracedStep, interval_share: float) -> Ledger:
    """Returns a ledger whose GPU total is known by a trace.

    Where both agree, the closed forms stand. Where they do not, each phase that the trace covers gets an entry for the
    difference, so that its peak is the traced one.
    """
    plain = without_trace(ledger.gpu)
    found = compare(plain, step, interval_share)
    shares = {item.phase: item.by_account for item in step.phases}
    entries = []
    if not found.agrees:
        entries = [_difference(plain, item, shares[item.phase], step) for item in found.phases if item.difference_bytes]
    if abs(found.held_bytes) > found.held_interval_bytes:
        entries.append(_held(plain, found, step))
    if not entries:
        return replace(ledger, gpu=replace(plain, grade=Grade.TRACED))
    return replace(ledger, gpu=replace(resource_ledger(Resource.GPU, (*plain.entries, *entries)), grade=Grade.TRACED))


def without_trace(bill: ResourceLedger) -> ResourceLedger:
    """Returns the closed forms of a ledger alone."""
    if bill.grade is Grade.ESTIMATED:
        return bill
    kept = [entry for entry in bill.entries if not entry.name.startswith((_DIFFERENCE, _HELD))]
    return resource_ledger(bill.resource, kept)


def _difference(bill: ResourceLedger, item: PhaseComparison, traced: dict[Account, int], step: TracedStep) -> Entry:
    """Returns the entry that brings one phase's peak to the traced one, under the account that is farthest off."""
    moment = _largest_moment(bill, item.phase)
    ours = dict.fromkeys(Account, 0)
    for entry in bill.entries:
        if entry.in_allocator and moment in entry.moments and _OUTSIDE_TRACE not in entry.name:
            ours[entry.account] += entry.bytes
    sign = 1 if item.difference_bytes > 0 else -1
    account = max(Account, key=lambda key: sign * (traced.get(key, 0) - ours[key]))
    return Entry(
        name=f"{_DIFFERENCE}-{item.phase.value}",
        account=account,
        resource=Resource.GPU,
        bytes=item.difference_bytes,
        moments=frozenset(moment for moment in Moment if moment.phase is item.phase),
        formula=f"{item.traced_bytes} B traced - {item.ledger_bytes} B of the entries above",
        source=_source(step),
        grade=Grade.TRACED,
    )


def _held(bill: ResourceLedger, found: Comparison, step: TracedStep) -> Entry:
    """Returns the entry for what the traced allocator holds beyond what the ledger expects of it, or short of that."""
    reserved = step.reserved
    return Entry(
        name=_HELD,
        account=Account.WORKSPACE,
        resource=Resource.GPU,
        bytes=found.held_bytes,
        moments=frozenset(Moment),
        formula=f"{reserved.expected_bytes} B reserved in a replay of the allocator - allocated and "
        f"{bill.reserved_above_allocated_bytes} B of rounding",
        source=_source(step),
        grade=Grade.TRACED,
        in_allocator=False,
        uncertainty_bytes=max(reserved.high_bytes - reserved.expected_bytes, 0),
        uncertainty="the order of allocations",
    )


def _source(step: TracedStep) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(step.versions.items()))
    return f"trace of the modelling code ({versions})"


def _largest_moment(bill: ResourceLedger, phase: Phase) -> Moment:
    return max((item for item in Moment if item.phase is phase), key=lambda item: bill.by_moment[item])


def _outside_bytes(bill: ResourceLedger, moment: Moment) -> int:
    """Returns what the ledger counts as allocated at a moment and the trace leaves out."""
    return sum(
        entry.bytes
        for entry in bill.entries
        if entry.in_allocator and moment in entry.moments and _OUTSIDE_TRACE in entry.name
    )


def _uncertainty_bytes(bill: ResourceLedger, moment: Moment) -> int:
    return sum(entry.uncertainty_bytes for entry in bill.entries if entry.in_allocator and moment in entry.moments)
