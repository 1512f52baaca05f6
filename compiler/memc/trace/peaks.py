"""What a tape says: the allocated peak at each moment of the last step, and what it is made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from memc.trace.records import BLOCK_BYTES, Event, Owner, Part, Region, Stage
from memc.trace.tape import Tape
from memc.units import round_up


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


@dataclass(frozen=True)
class Peak:
    """The largest allocated sum in some part of a step, in bytes, every block rounded up to 512."""

    allocated_bytes: int
    shares: dict[Share, int] = field(default_factory=dict)


def region_peaks(tape: Tape) -> dict[tuple[Stage, Region], Peak]:
    """Returns the peak in every stage and region of the last optimizer step."""
    first = _first_stage_of_last_step(tape)
    kept = _kept_blocks(tape)
    shares: Counter[Share] = Counter()
    total = 0
    peaks: dict[tuple[Stage, Region], Peak] = {}
    for event in tape.events:
        key = (tape.stages[event.stage_index], _region(tape, event))
        if event.stage_index >= first and key not in peaks:
            peaks[key] = Peak(total, dict(shares))
        size = event.delta * round_up(tape.blocks[event.block].size_bytes, BLOCK_BYTES)
        total += size
        shares[share_of(tape, event.block, kept)] += size
        if event.stage_index >= first and total > peaks[key].allocated_bytes:
            peaks[key] = Peak(total, dict(shares))
    return peaks


def _region(tape: Tape, event: Event) -> Region:
    return Region(Part.ABOVE) if tape.stages[event.stage_index] is Stage.STEP else event.region


def _first_stage_of_last_step(tape: Tape) -> int:
    steps = [index for index, stage in enumerate(tape.stages) if stage is Stage.STEP]
    return steps[-2] + 1 if len(steps) > 1 else 1


def _kept_blocks(tape: Tape) -> set[int]:
    """Returns the blocks that were made in a forward and outlived it."""
    kept: set[int] = set()
    alive: set[int] = set()
    stage = 0
    for event in tape.events:
        if event.stage_index != stage:
            if tape.stages[stage] is Stage.FORWARD:
                kept |= {block for block in alive if tape.blocks[block].stage_index == stage}
            stage = event.stage_index
        if event.delta > 0:
            alive.add(event.block)
        else:
            alive.discard(event.block)
    return kept


def share_of(tape: Tape, block: int, kept: set[int]) -> Share:
    """Returns what a block counts as."""
    owner = tape.owners.get(block, Owner.TENSORS)
    if owner is not Owner.TENSORS:
        return Share(owner.value)
    return Share.SAVED if block in kept else Share.WORKING


def instant_of(stage: Stage, region: Region, layers: int) -> Instant:
    """Returns the instant that a stage and a region belong to."""
    if stage is Stage.STEP:
        return Instant.STEP
    if stage is Stage.FORWARD:
        return Instant.LOSS_FORWARD if region.part is Part.ABOVE else Instant.FORWARD
    if region.part is not Part.LAYER:
        return Instant.LOSS_BACKWARD if region.part is Part.ABOVE else Instant.BACKWARD_EMBEDDING
    if region.layer == layers - 1:
        return Instant.BACKWARD_FIRST_LAYER
    return Instant.BACKWARD_LAST_LAYER if region.layer == 0 else Instant.BACKWARD_MIDDLE


def saved_bytes(tape: Tape) -> tuple[int, int, int]:
    """Returns what the last forward leaves behind, in unrounded bytes.

    First what the second layer keeps, then the weight casts of that layer, then what everything outside the layers
    keeps (without weight casts).
    """
    last = max(index for index, stage in enumerate(tape.stages) if stage is Stage.FORWARD)
    layer = casts = outside = 0
    for block in _kept_blocks(tape):
        made = tape.blocks[block]
        is_cast = tape.owners.get(block) is Owner.WEIGHT_CASTS
        if made.stage_index != last:
            continue
        if made.region == Region(Part.LAYER, 1):
            layer += 0 if is_cast else made.size_bytes
            casts += made.size_bytes if is_cast else 0
        elif made.region.part is not Part.LAYER and not is_cast:
            outside += made.size_bytes
    return layer, casts, outside
