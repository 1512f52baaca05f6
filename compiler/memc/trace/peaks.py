"""What a record says: the allocated peak at each moment of the last step, and what it is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from memc.trace.records import BLOCK_BYTES, Owner, Part, Recording, Region, Stage


class Instant(StrEnum):
    """Part of a step that can hold its peak. Backward visits the layers from the last to the first."""

    FORWARD = "forward"
    LOSS_FORWARD = "loss_forward"
    LOSS_BACKWARD = "loss_backward"
    BACKWARD_FIRST_LAYER = "backward_first_layer"
    BACKWARD_MIDDLE = "backward_middle"
    BACKWARD_LAST_LAYER = "backward_last_layer"
    BACKWARD_EMBEDDING = "backward_embedding"
    STEP = "step"


class Share(StrEnum):
    """What allocated bytes are. `saved` was made in forward and waits for backward; `working` is everything else."""

    PARAMETERS = "parameters"
    WEIGHT_CASTS = "weight_casts"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    INPUTS = "inputs"
    SAVED = "saved"
    WORKING = "working"
    KERNEL_WORKSPACE = "kernel_workspace"


_SHARES = {owner: Share(owner.value) for owner in Owner if owner.value in set(Share)}


@dataclass(frozen=True)
class Peak:
    """The largest allocated sum in some part of a step, in bytes, every block rounded up to 512."""

    allocated_bytes: int
    shares: dict[Share, int] = field(default_factory=dict)


def peaks_by_instant(record: Recording) -> dict[Instant, Peak]:
    """Returns the peak of every instant of the last optimizer step, in the order of a step."""
    instants, sizes = _instants(record), block_sizes(record)
    at: dict[Instant, tuple[int, int]] = {}
    total = highest = 0
    stage, where, instant = -1, None, None
    for index, (block, delta, stage_index, region, _) in enumerate(record.events):
        before, total = total, total + delta * sizes[block]
        if stage_index != stage or region is not where:
            stage, where = stage_index, region
            instant = instants.get((stage, where))
            if instant is not None:
                highest = at.setdefault(instant, (before, index - 1))[0]
        if instant is not None and total > highest:
            at[instant], highest = (total, index), total
    shares = shares_at(record, {index for _, index in at.values()})
    return {i: Peak(at[i][0], shares[at[i][1]]) for i in Instant if i in at}


def block_sizes(record: Recording) -> list[int]:
    """Returns what each block takes of the allocator's memory."""
    return [-(-block.size_bytes // BLOCK_BYTES) * BLOCK_BYTES for block in record.blocks]


def _instants(record: Recording) -> dict[tuple[int, Region | None], Instant]:
    """Returns the instant of every place in every stage of the last step."""
    first = first_stage_of_last_step(record)
    regions: dict[int, list[Region]] = {}
    for event in record.events:
        if event.stage_index >= first:
            visited = regions.setdefault(event.stage_index, [])
            if not visited or visited[-1] != event.region:
                visited.append(event.region)
    found: dict[tuple[int, Region | None], Instant] = {}
    for stage_index, visited in regions.items():
        layers = [region for region in visited if region.part is Part.LAYER]
        for region in visited:
            found[stage_index, region] = _instant(record.stages[stage_index], region, layers)
    return found


def _instant(stage: Stage, region: Region, layers: list[Region]) -> Instant:
    if stage is Stage.STEP:
        return Instant.STEP
    if stage is Stage.FORWARD:
        return Instant.LOSS_FORWARD if region.part is Part.ABOVE else Instant.FORWARD
    if region.part is Part.ABOVE:
        return Instant.LOSS_BACKWARD
    if region.part is Part.BELOW:
        return Instant.BACKWARD_EMBEDDING
    if region == layers[0]:
        return Instant.BACKWARD_FIRST_LAYER
    return Instant.BACKWARD_LAST_LAYER if region == layers[-1] else Instant.BACKWARD_MIDDLE


def first_stage_of_last_step(record: Recording) -> int:
    """Returns the position of the stage that the last optimizer step begins with."""
    steps = [index for index, stage in enumerate(record.stages) if stage is Stage.STEP]
    return steps[-2] + 1 if len(steps) > 1 else 1


def shares_at(record: Recording, indices: Iterable[int]) -> dict[int, dict[Share, int]]:
    """Returns what allocated bytes are after the events at `indices` (-1: before the first)."""
    wanted, kept, sizes = set(indices), kept_blocks(record), block_sizes(record)
    shares: Counter[Share] = Counter()
    found: dict[int, dict[Share, int]] = {-1: {}} if -1 in wanted else {}
    for index, (block, delta, *_) in enumerate(record.events):
        shares[share_of(record, block, kept)] += delta * sizes[block]
        if index in wanted:
            found[index] = {share: size for share, size in shares.items() if size}
    return found


def kept_blocks(record: Recording) -> set[int]:
    """Returns the blocks that were made in a forward and outlived it."""
    kept: set[int] = set()
    alive: set[int] = set()
    stage = 0
    for block, delta, stage_index, *_ in record.events:
        if stage_index != stage:
            if record.stages[stage] is Stage.FORWARD:
                kept |= {held for held in alive if record.blocks[held].stage_index == stage}
            stage = stage_index
        if delta > 0:
            alive.add(block)
        else:
            alive.discard(block)
    return kept


def share_of(record: Recording, block: int, kept: set[int]) -> Share:
    """Returns what a block counts as."""
    owner = record.owners.get(block, Owner.TENSORS)
    if owner is not Owner.TENSORS:
        return _SHARES[owner]
    return Share.SAVED if block in kept else Share.WORKING


def saved_bytes(record: Recording, stack: str) -> tuple[int, int, int]:
    """Returns what the last forward leaves behind, in unrounded bytes.

    First what the second layer of `stack` keeps, then the weight casts of that layer, then what everything outside
    the layers keeps (without weight casts).
    """
    last = max(index for index, stage in enumerate(record.stages) if stage is Stage.FORWARD)
    layer = casts = outside = 0
    for block in kept_blocks(record):
        made = record.blocks[block]
        is_cast = record.owners.get(block) is Owner.WEIGHT_CASTS
        if made.stage_index != last:
            continue
        if made.region == Region(Part.LAYER, 1, stack):
            layer += 0 if is_cast else made.size_bytes
            casts += made.size_bytes if is_cast else 0
        elif made.region.part is not Part.LAYER and not is_cast:
            outside += made.size_bytes
    return layer, casts, outside
