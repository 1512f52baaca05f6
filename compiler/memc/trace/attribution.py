"""Who holds the bytes: by module at the peak of each phase, and over the course of a step."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from memc.ledger.entries import Account, Phase
from memc.trace.peaks import (
    Share,
    block_sizes,
    first_stage_of_last_step,
    kept_blocks,
    share_of,
)
from memc.trace.records import Event, Part, Recording, Stage

ACCOUNTS = {
    Share.PARAMETERS: Account.PARAMETERS,
    Share.WEIGHT_CASTS: Account.PARAMETERS,
    Share.GRADIENTS: Account.GRADIENTS,
    Share.OPTIMIZER_STATES: Account.OPTIMIZER_STATES,
    Share.INPUTS: Account.ACTIVATIONS,
    Share.SAVED: Account.ACTIVATIONS,
    Share.WORKING: Account.ACTIVATIONS,
    Share.KERNEL_WORKSPACE: Account.WORKSPACE,
}
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
_TIMELINE_POINTS = 400


@dataclass(frozen=True, kw_only=True)
class ModuleShare:
    """Bytes that one module of a model, or the same module of all its layers together, made and still holds.

    Attributes:
        module: Module name, with `*` in place of layer numbers; empty for the model itself, the loss and the optimizer.
        share: What the bytes are.
        allocated_bytes: Their sum, every block rounded up to 512.
        blocks: How many blocks they are.
        operator: The operator that made most of them.
    """

    module: str
    share: Share
    allocated_bytes: int
    blocks: int
    operator: str


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The largest allocated sum of one phase of a step, and who holds it.

    Attributes:
        phase: Which phase. Forward ends with the last layer; loss is what comes after it and before its backward.
        allocated_bytes: The sum, every block rounded up to 512.
        running: Module that ran then.
        modules: Who holds it, largest first; all of it.
    """

    phase: Phase
    allocated_bytes: int
    running: str
    modules: tuple[ModuleShare, ...]

    @property
    def by_account(self) -> dict[Account, int]:
        """Bytes by account; all accounts are in it."""
        sums = dict.fromkeys(Account, 0)
        for part in self.modules:
            sums[ACCOUNTS[part.share]] += part.allocated_bytes
        return sums

    @property
    def by_share(self) -> dict[Share, int]:
        """Bytes by what they are."""
        sums: dict[Share, int] = {}
        for part in self.modules:
            sums[part.share] = sums.get(part.share, 0) + part.allocated_bytes
        return sums


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """The largest allocated sum in one slice of a step.

    Attributes:
        event: Number of allocations and releases since the step began.
        phase: Phase at that time.
        module: Module that ran.
        allocated_bytes: Sum of all blocks, each rounded up to 512.
    """

    event: int
    phase: Phase
    module: str
    allocated_bytes: int


@dataclass
class _Highest:
    total: int = -1
    index: int = -1
    module: str = ""


def phase_of(record: Recording, event: Event) -> Phase:
    """Returns the phase that an event belongs to."""
    stage = record.stages[event.stage_index]
    if stage in (Stage.FORWARD, Stage.BACKWARD) and event.region.part is Part.ABOVE:
        return Phase.LOSS
    return Phase(stage.value)


def phase_peaks(record: Recording) -> dict[Phase, PhasePeak]:
    """Returns the peak of each phase of the last step, and of loading, in time order."""
    first = first_stage_of_last_step(record)
    highest: dict[Phase, _Highest] = {}
    sizes = block_sizes(record)
    total = 0
    phases: dict[tuple[int, Part], Phase] = {}
    for index, event in enumerate(record.events):
        total += event.delta * sizes[event.block]
        if 0 < event.stage_index < first:
            continue
        place = (event.stage_index, event.region.part)
        if place not in phases:
            phases[place] = phase_of(record, event)
            highest.setdefault(phases[place], _Highest())
        best = highest[phases[place]]
        if total > best.total:
            best.total, best.index, best.module = total, index, event.module
    held = _held_at(record, {best.index for best in highest.values()})
    kept = kept_blocks(record)
    return {
        phase: PhasePeak(
            phase=phase,
            allocated_bytes=highest[phase].total,
            running=highest[phase].module,
            modules=_by_module(record, held[highest[phase].index], kept),
        )
        for phase in Phase
        if phase in highest
    }


def _held_at(record: Recording, indices: set[int]) -> dict[int, tuple[int, ...]]:
    alive: dict[int, None] = {}
    found: dict[int, tuple[int, ...]] = {}
    for index, (block, delta, *_) in enumerate(record.events):
        if delta > 0:
            alive[block] = None
        else:
            alive.pop(block, None)
        if index in indices:
            found[index] = tuple(alive)
    return found


def _by_module(record: Recording, held: tuple[int, ...], kept: set[int]) -> tuple[ModuleShare, ...]:
    sums: dict[tuple[str, Share], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    counts: dict[tuple[str, Share], int] = defaultdict(int)
    names: dict[str, str] = {}
    sizes = block_sizes(record)
    for block in held:
        made = record.blocks[block]
        name = names.setdefault(made.module, _INDEX.sub("*", made.module))
        key = (name, share_of(record, block, kept))
        sums[key][made.operator] += sizes[block]
        counts[key] += 1
    parts = [
        ModuleShare(
            module=key[0],
            share=key[1],
            allocated_bytes=sum(by_operator.values()),
            blocks=counts[key],
            operator=max(by_operator, key=lambda operator: by_operator[operator]),
        )
        for key, by_operator in sums.items()
    ]
    return tuple(sorted(parts, key=lambda part: (-part.allocated_bytes, part.module, part.share)))


def timeline(record: Recording, points: int = _TIMELINE_POINTS) -> tuple[TimelinePoint, ...]:
    """Returns the course of the last step in at most `points` slices of equally many events, each at its highest."""
    first = first_stage_of_last_step(record)
    start = next(index for index, event in enumerate(record.events) if event.stage_index >= first)
    sizes = block_sizes(record)
    total = sum(event.delta * sizes[event.block] for event in record.events[:start])
    width = -(-(len(record.events) - start) // points)
    found: list[TimelinePoint] = []
    for number, event in enumerate(record.events[start:]):
        total += event.delta * sizes[event.block]
        if number % width == 0:
            found.append(TimelinePoint(number, phase_of(record, event), event.module, total))
        elif total > found[-1].allocated_bytes:
            found[-1] = TimelinePoint(number, phase_of(record, event), event.module, total)
    return tuple(found)
