"""The reference of preference training: a frozen second model, and a forward without gradients beside kept activations.

TRL scores a batch with the model, then, before backward, with the reference; what the model kept waits meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memc.config import Engine, LossHead, Offload, Reference, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.blockrun import LayerMode, layer_run, situation, tail_run
from memc.ledger.constants import LedgerFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.image_shapes import image_shapes
from memc.ledger.layer import shapes_of
from memc.ledger.parts import ALWAYS, gpu_entry, host_entry
from memc.ledger.peaks import Peaks, Sum
from memc.ledger.places import places
from memc.ledger.states import ParamCounts
from memc.units import ceil_div, next_power_of_two

SOURCE = "trl 1.16.0 trainer/dpo_trainer.py _compute_loss"
_RUNS = frozenset({Moment.LOSS, Moment.EVALUATE})


@dataclass(frozen=True, slots=True)
class FrozenForward:
    """A forward that keeps nothing: the largest layer, or the head and the loss.

    Attributes:
        peaks: The run at whose peak most is alive.
        at: That peak.
        casts: Bytes of weight copies that autocast holds until the forward ends.
        inputs: Bytes of what all layers are given that is alive then; 0 at the head.
    """

    peaks: Peaks
    at: Sum
    casts: int
    inputs: int


def frozen_forward(
    model: ModelFacts, config: TrainingConfig, mode: LayerMode, facts: LedgerFacts, batch: int, inputs: int = 0
) -> FrozenForward:
    """Returns a forward without gradients of `batch` sequences.

    Args:
        inputs: Bytes of what all layers are given, which are let go of before the head runs.
    """
    shapes, casts = shapes_of(mode, batch, image_shapes(model, config)), 0
    layers = [place for place in places(model) if place.index >= 0]
    chunked = config.loss is LossHead.CHUNKED
    tile = (facts.loss_tile_tokens, facts.loss_tile_vocab)
    tail = tail_run(model, mode, chunked=chunked, tile=tile, items=(mode.types.stream, mode.types.stream))
    runs: list[tuple[Peaks, int]] = []
    for place in {(id(one.block), one.unit): one for one in layers}.values():
        run = layer_run(place.block, mode, replace(situation(place.block, mode, batch=batch), unit=place.unit))
        casts += run.cached_casts.bytes(shapes) * sum(1 for one in layers if one.block is place.block)
        runs.append((run.evaluated, inputs))
    runs.append((tail.evaluated, 0))
    found = [FrozenForward(peaks, peaks.largest(shapes), casts, given) for peaks, given in runs]
    return max(found, key=lambda one: one.at.bytes(shapes) + one.inputs)


def reference_mode(mode: LayerMode) -> LayerMode:
    """Returns how the reference runs: the same types, nothing trained, no adapters."""
    return replace(mode, trains=False, adapted=frozenset(), rank=0, dropout=False)


def runs_reference(config: TrainingConfig) -> bool:
    """Whether every step runs the reference."""
    return config.reference in (Reference.MODEL, Reference.ADAPTERS_OFF)


def reference_entries(config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns the weights of a second model on one GPU, and the window through which ZeRO-3 gathers them.

    Source: trl 1.16.0 models/utils.py prepare_deepspeed: ZeRO-3 partitions the reference too, with an engine of its
        own; below it every GPU holds it whole, in the engine's 16 bits. accelerate prepare_model puts it on the GPU as
        it was loaded; DistributedDataParallel does not wrap it.
    """
    if config.reference is not Reference.MODEL:
        return []
    zero, size = config.zero, dtypes(config).weight
    if zero is None or zero.stage < 3:
        text = f"{size} B x {counts.total} elements of the frozen reference, whole on every GPU"
        return [gpu_entry("reference-weights", Account.PARAMETERS, size * counts.total, ALWAYS, text, SOURCE)]
    share = ceil_div(counts.total, config.world_size)
    text = f"{size} B x {counts.total} elements of the frozen reference / {config.world_size} ranks"
    on_gpu = zero.offload_param is Offload.NONE
    window = min(counts.total, max(zero.max_live_elements, counts.largest_module + zero.prefetch_elements))
    entries = [
        gpu_entry("reference-weights", Account.PARAMETERS, size * share if on_gpu else 0, ALWAYS, text, SOURCE),
        gpu_entry(
            "reference-gathered-parameters",
            Account.WORKSPACE,
            2 * window,
            _RUNS,
            f"2 B x {window} elements: stage3_max_live_parameters of the reference's own engine",
            "DeepSpeed partitioned_param_coordinator.py",
        ),
    ]
    if zero.offload_param is Offload.CPU:
        pinned = next_power_of_two(2 * share)
        size_host = config.gpus_per_node * pinned
        text = f"{config.gpus_per_node} ranks x 2 B x {share} elements, pinned: rounded up to {pinned} B"
        entries.append(host_entry("reference-weights", Account.PARAMETERS, size_host, ALWAYS, text, SOURCE))
    return entries


def reference_load_entries(config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns what loading a second model takes of a node's memory: it is read after the first, in the same way."""
    if config.reference is not Reference.MODEL:
        return []
    size, ranks = dtypes(config).weight, config.gpus_per_node
    staged = ranks if config.engine is not Engine.DEEPSPEED or config.zero_stage < 3 else 1
    text = f"{staged} x {size} B x {counts.total} elements of the reference beside the model, until both are placed"
    return [
        host_entry(
            "reference-in-memory",
            Account.PARAMETERS,
            staged * size * counts.total,
            frozenset({Moment.LOAD}),
            text,
            "transformers from_pretrained",
        )
    ]
