"""What a tape is made of: stages, places, owners, blocks and events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

BLOCK_BYTES = 512
"""Sizes of the caching allocator's blocks are multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""

Kernel = Callable[[tuple[Any, ...]], Sequence[int]]


class Stage(StrEnum):
    """What a training loop is doing."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Part(StrEnum):
    """Which part of the model an event belongs to: before the layers, in a layer, after the layers."""

    BELOW = "below"
    LAYER = "layer"
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


@dataclass(frozen=True, slots=True)
class Region:
    """Where a run is: the part of the model and, inside the layers, the layer's index (-1 outside)."""

    part: Part
    layer: int = -1


@dataclass(slots=True)
class Block:
    """One storage: its size, the operator that made it, and where the run was then."""

    size_bytes: int
    operator: str
    stage_index: int
    region: Region
    module: str


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation (`delta` +1) or a release (-1) of a block."""

    block: int
    delta: int
    stage_index: int
    region: Region
