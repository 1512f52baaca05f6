"""What a tape is made of: stages, places, owners, blocks and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

BLOCK_BYTES = 512
"""Sizes of the caching allocator's blocks are multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""

Kernel = Callable[[tuple[Any, ...]], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Card:
    """What of a GPU decides which kernels run and what they allocate.

    Attributes:
        compute_capability: (major, minor).
        multiprocessors: Streaming multiprocessors, among which reductions are spread.
    """

    compute_capability: tuple[int, int]
    multiprocessors: int


H100 = Card(compute_capability=(9, 0), multiprocessors=132)
"""Source: torch.cuda.get_device_properties of an H100 SXM (specs/gpus/h100-sxm5-80gb.yaml)."""


class Stage(StrEnum):
    """What a training loop is doing."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    STAND_IN = "stand_in"


class Part(StrEnum):
    """Which part of the model an event belongs to: before all layers, in a layer, between stacks, after all layers."""

    BELOW = "below"
    LAYER = "layer"
    BETWEEN = "between"
    ABOVE = "above"


class Owner(StrEnum):
    """What a storage holds."""

    PARAMETERS = "parameters"
    WEIGHT_CASTS = "weight_casts"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    INPUTS = "inputs"
    TENSORS = "tensors"
    KERNEL_WORKSPACE = "kernel_workspace"
    HOST = "host"


class Region(NamedTuple):
    """Where a run is: the part of the model and, inside the layers, the layer's index and its stack's module name.

    Outside the layers the index is -1 and the stack is empty.
    """

    part: Part
    layer: int = -1
    stack: str = ""


@dataclass(slots=True)
class Block:
    """One storage: its size, the operator that made it, and where the run was then."""

    size_bytes: int
    operator: str
    stage_index: int
    region: Region
    module: str


class Event(NamedTuple):
    """An allocation (`delta` +1) or a release (-1) of a block, and the place and module that ran then."""

    block: int
    delta: int
    stage_index: int
    region: Region
    module: str = ""


@dataclass(slots=True)
class Recording:
    """What a tape has written down.

    Attributes:
        blocks: Every storage, in order of allocation.
        events: Allocations and releases, in order.
        stages: What the loop was doing, in order; blocks and events refer to it by position.
        owners: What a block holds, for those that are known.
        lists: For blocks that the optimizer makes of a list of tensors, how many of them belong where.
    """

    blocks: list[Block]
    events: list[Event]
    stages: list[Stage]
    owners: dict[int, Owner] = field(default_factory=dict)
    lists: dict[int, Counter[Region]] = field(default_factory=dict)
