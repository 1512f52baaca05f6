"""What DeepSpeed's ZeRO holds on one GPU for what trains, from its initialisation to its step.

Ranks differ: gradients are kept by whole parameters of a rank's part. The fullest rank is booked at each moment.
"""

from __future__ import annotations

from typing import TypeAlias

from memc.config import LossHead, Offload, TrainingConfig, ZeroConfig
from memc.facts.records import ModelFacts
from memc.ledger.constants import LedgerFacts
from memc.ledger.dtypes import Dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.holes import CUT, EMBEDDING, PART, SUB_GROUP, TIGHT, WHOLE
from memc.ledger.partitions import Holdings, holdings, largest_sub_group, trained_matrices
from memc.ledger.parts import AFTER_LOAD, ALWAYS, BACKWARD, TRAINING, cached_entry, gpu_entry
from memc.ledger.states import ParamCounts
from memc.ledger.zero_norms import FP64_BYTES, norm_entries
from memc.units import ceil_div

_ZERO = "DeepSpeed stage_1_and_2.py, stage3.py"
_STAGE_2 = "DeepSpeed stage_1_and_2.py"
_STAGE_3 = "DeepSpeed stage3.py"
_LOAD = frozenset({Moment.LOAD})
_AHEAD = frozenset({Moment.FORWARD, Moment.LOSS})
_FIRST = frozenset({Moment.BACKWARD_FIRST_LAYER})
_LAST = frozenset({Moment.BACKWARD_LAST_LAYER})
_EMBEDDING = frozenset({Moment.BACKWARD_EMBEDDING})
_STEP = frozenset({Moment.STEP})

_Held: TypeAlias = "tuple[str, frozenset[Moment], int]"
"""Gradients of some moments: the entry's name, the moments, elements."""


def zero_entries(
    model: ModelFacts, config: TrainingConfig, counts: ParamCounts, types: Dtypes, facts: LedgerFacts
) -> list[Entry]:
    """Returns what DeepSpeed holds on one GPU for the trainable elements."""
    zero = config.zero
    assert zero is not None
    ranks = config.world_size
    share = ceil_div(counts.trainable, ranks if zero.stage else 1)
    text = f"{counts.trainable} trainable elements" + (f" / {ranks} ranks" if zero.stage else "")
    entries: list[Entry] = []
    if zero.offload_optimizer is Offload.NONE:
        master, moment = zero.master_bytes, zero.moment_bytes
        moments = f"2 moments x {moment} B x {text}"
        entries += [
            gpu_entry("master-weights", Account.MASTER_WEIGHTS, master * share, ALWAYS, f"{master} B x {text}", _ZERO),
            gpu_entry("adam-moments", Account.OPTIMIZER_STATES, 2 * moment * share, AFTER_LOAD, moments, _ZERO),
        ]
    if zero.stage == 3:
        entries += _stage_3(model, config, counts, types, facts, share, text)
    elif zero.stage:
        entries += _flattening(config, counts, types, facts, share)
        entries += _partitioned_gradients(model, config, counts, types, facts)
        entries += _flat_copies(config, counts, types, share, text)
    else:
        stays = TRAINING if config.gradient_accumulation_steps > 1 else (_LAST | _EMBEDDING | _STEP)
        size = types.gradient * counts.trainable
        formula = f"{types.gradient} B x {counts.trainable} elements"
        entries.append(gpu_entry("gradients", Account.GRADIENTS, size, stays, formula, _ZERO))
    return [*entries, *_buckets(zero)]


def flattened_on_gpu(config: TrainingConfig, counts: ParamCounts, types: Dtypes, facts: LedgerFacts) -> bool:
    """Returns whether stages 1 and 2 copy what trains into one flat buffer on the GPU; they use the host otherwise.

    Source: DeepSpeed runtime/zero/stage_1_and_2.py __init__, flatten_on_accelerator: the card's free memory decides.
    """
    if not facts.capacity_bytes:
        return True
    loaded = types.weight * counts.total + types.gradient * counts.trainable
    outside = facts.context_bytes + (facts.nccl_bytes if config.world_size > 1 else 0)
    return outside + loaded + types.gradient * counts.trainable <= facts.capacity_bytes


def _flattening(
    config: TrainingConfig, counts: ParamCounts, types: Dtypes, facts: LedgerFacts, share: int
) -> list[Entry]:
    """Returns what initialisation of stages 1 and 2 takes beside weights and masters, the largest of three instants.

    First all that trains is copied into one flat buffer, before there are masters; then this rank's part is copied on
    its way to a master; then gradients as large as the masters are made and dropped.
    """
    zero = config.zero
    assert zero is not None
    size, on_gpu = types.gradient, zero.offload_optimizer is Offload.NONE
    master = zero.master_bytes * share if on_gpu else 0
    flat = size * counts.trainable if flattened_on_gpu(config, counts, types, facts) else 0
    part = size * share if zero.master_bytes != size else 0
    staging = 0 if on_gpu or zero.stage == 1 else size * counts.largest_tensor
    extra = max(flat - master, part, master, staging)
    return [
        gpu_entry(
            "zero-initialisation",
            Account.WORKSPACE,
            extra,
            _LOAD,
            f"the largest of {flat} B of a flat copy less {master} B of masters that come later, {part} B of this "
            f"rank's part on its way to a master, {master} B of gradients of the masters",
            "DeepSpeed stage_1_and_2.py __init__, initialize_optimizer_states",
        )
    ]


def _partitioned_gradients(
    model: ModelFacts, config: TrainingConfig, counts: ParamCounts, types: Dtypes, facts: LedgerFacts
) -> list[Entry]:
    """Returns gradients of stages 1 and 2 by moment, and what their reduction's stream keeps in between."""
    zero, size = config.zero, types.gradient
    assert zero is not None
    if zero.stage == 2 and zero.offload_optimizer is not Offload.NONE:
        return [
            gpu_entry(
                "gradient-staging",
                Account.GRADIENTS,
                size * counts.largest_tensor,
                AFTER_LOAD,
                f"{size} B x {counts.largest_tensor} elements of the largest tensor",
                "DeepSpeed stage_1_and_2.py temp_grad_buffer_for_gpu_offload",
            ),
            *norm_entries(config, counts, trained_matrices(model, config), size, facts),
            *_each(size, _arriving(counts), "of tensors that are not yet on their way to the host"),
        ]
    matrices = trained_matrices(model, config)
    held = holdings(matrices, config.world_size, zero.reduce_bucket_elements)
    rest = ceil_div(max(0, counts.trainable - sum(matrices)), config.world_size)
    accumulates = config.gradient_accumulation_steps > 1
    if zero.stage == 2:
        sizes = _stage_2(held, counts, accumulates=accumulates)
    else:
        sizes = _stage_1(held, counts, accumulates=accumulates, overlaps=zero.overlap_comm)
    entries = _each(size, [(name, moments, elements + rest if elements else 0) for name, moments, elements in sizes])
    if zero.overlap_comm:
        entries.append(
            cached_entry(
                "reduction-stream",
                Account.GRADIENTS,
                size * held.own,
                _AHEAD | (_STEP if zero.stage == 2 and accumulates else frozenset()),
                f"{size} B x {held.own} elements of this rank's gradients, whose memory serves their stream alone",
                "DeepSpeed stage_1_and_2.py reduce_ipg_grads; torch CUDACachingAllocator.cpp",
            )
        )
    return entries


def _each(size: int, sizes: list[_Held], what: str = "on the fullest rank") -> list[Entry]:
    """Returns one entry of gradients for each group of moments."""
    return [
        gpu_entry(name, Account.GRADIENTS, size * elements, moments, f"{size} B x {elements} elements {what}", _ZERO)
        for name, moments, elements in sizes
    ]


def _arriving(counts: ParamCounts) -> list[_Held]:
    """Returns elements of gradients that autograd has just made, where they are large."""
    return [("gradients-first-layer", _FIRST, counts.head), (EMBEDDING, _EMBEDDING, counts.embedding)]


def _stage_1(held: Holdings, counts: ParamCounts, *, accumulates: bool, overlaps: bool) -> list[_Held]:
    """Returns elements of gradients by moments: all that are no bucket's stay until the pass ends."""
    every, head, embedding = counts.trainable, counts.head, counts.embedding
    if not overlaps:
        ahead = every if accumulates else 0
        return [
            ("gradients", _AHEAD, ahead),
            ("gradients-first-layer", _FIRST, max(ahead, head)),
            ("gradients-last-layer", _LAST, every),
            ("gradients-embedding", _EMBEDDING, every + held.own - embedding),
            (EMBEDDING, _EMBEDDING, embedding),
            ("gradients-of-partition", _STEP, held.own),
        ]
    if accumulates:
        return [
            ("gradients", _AHEAD, every),
            ("gradients-first-layer", _FIRST, every + held.last),
            ("gradients-last-layer", _LAST, max(every, held.kept_with_lowest)),
            ("gradients-embedding", _EMBEDDING, max(every, held.kept_with_lowest)),
            (EMBEDDING, _EMBEDDING, embedding),
            ("gradients-of-partition", _STEP, held.own),
        ]
    return [
        ("gradients-first-layer", _FIRST, head + held.last),
        ("gradients-last-layer", _LAST, held.kept),
        ("gradients-embedding", _EMBEDDING, max(0, held.kept_with_lowest - embedding)),
        (EMBEDDING, _EMBEDDING, min(held.kept_with_lowest, embedding)),
        ("gradients-of-partition", _STEP, held.own),
    ]


def _stage_2(held: Holdings, counts: ParamCounts, *, accumulates: bool) -> list[_Held]:
    """Returns elements of gradients by moments: those of this rank's part, and a second time while passes add up."""
    before = held.own if accumulates else 0
    return [
        ("gradients", _AHEAD, before),
        ("gradients-first-layer", _FIRST, before + counts.head + held.last),
        ("gradients-last-layer", _LAST, before + held.own),
        ("gradients-embedding", _EMBEDDING, before + held.own),
        (EMBEDDING, _EMBEDDING, counts.embedding),
        ("gradients-of-partition", _STEP, held.own),
    ]


def _flat_copies(config: TrainingConfig, counts: ParamCounts, types: Dtypes, share: int, text: str) -> list[Entry]:
    """Returns the copies of this rank's gradients that the step of stages 1 and 2 works on.

    On two ranks they find no room in what the pass held where the largest gradient's fp64 copy, of which stage 2 takes
    the norm first, does not fit in half the place of initialisation's flat copy, in which the pass lay: it comes after
    all that stays, and they come where it was.

    Source: DeepSpeed stage_1_and_2.py get_grad_norm_direct; torch CUDACachingAllocator.cpp get_free_block.
    """
    zero = config.zero
    assert zero is not None
    if zero.offload_optimizer is not Offload.NONE:
        return []
    chunked = config.loss is LossHead.CHUNKED
    far = 2 * FP64_BYTES * min(counts.largest_tensor, share) > types.gradient * counts.trainable
    kind = TIGHT if config.world_size == 2 and (chunked or far) else PART
    if zero.stage == 1:
        kind = CUT if chunked else WHOLE
    return _step_copies(zero, types, share, kind, text, f"{_STAGE_2} step")


def _step_copies(zero: ZeroConfig, types: Dtypes, elements: int, kind: str, text: str, source: str) -> list[Entry]:
    """Returns the step's gradients: flat, and in the masters' type unless that is its own. Each lies in one piece."""
    size, wide = types.gradient, zero.master_bytes
    copies = [
        ("gradients", size, f"{size} B flat gradient x {text}"),
        ("gradients-for-masters", 0 if wide == size else wide, f"{wide} B in the masters' type x {text}"),
    ]
    return [
        gpu_entry(kind + name, Account.WORKSPACE, each * elements, _STEP, formula, source)
        for name, each, formula in copies
    ]


def _stage_3(
    model: ModelFacts,
    config: TrainingConfig,
    counts: ParamCounts,
    types: Dtypes,
    facts: LedgerFacts,
    share: int,
    text: str,
) -> list[Entry]:
    """Returns gradient shards, initialisation, norms, the step's sub-group, and the window of gathered parameters."""
    zero, size = config.zero, types.gradient
    assert zero is not None
    on_gpu = zero.offload_optimizer is Offload.NONE
    matrices = trained_matrices(model, config)
    unit = largest_sub_group(matrices, config.world_size, zero.sub_group_elements) if on_gpu else 0
    shards = size * share if on_gpu else 0
    later = shards + 2 * zero.reduce_bucket_elements
    converted = zero.master_bytes * unit - later
    copied = zero.offload_param is not Offload.NONE
    largest = max(matrices, default=0)
    whole = size * (largest + (ceil_div(largest, config.world_size) if copied else 0))
    uncut = types.weight * counts.largest_module - later - (zero.master_bytes * share if on_gpu else 0)
    return [
        gpu_entry("gradient-shards", Account.GRADIENTS, shards, ALWAYS, f"{size} B x {text}", _ZERO),
        gpu_entry(
            "zero-initialisation",
            Account.WORKSPACE,
            max(0, converted, whole, uncut),
            _LOAD,
            f"the largest of {zero.master_bytes} B x {unit} elements of a sub-group on its way to a master, less "
            f"{later} B that come later; {whole} B of the largest parameter that trains, whole while its hook is made; "
            f"{uncut} B of the largest module before it is cut, less what comes later",
            f"{_STAGE_3} _create_fp32_partitions, create_reduce_and_remove_grad_hooks; zero.Init",
        ),
        *_step_copies(zero, types, unit, SUB_GROUP, f"{unit} elements of one sub-group", f"{_STAGE_3} step"),
        *norm_entries(config, counts, matrices, size, facts),
        *_gathering(model, config, counts),
    ]


def _gathering(model: ModelFacts, config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns the window of gathered parameters, and what gathering leaves in the memory of its stream.

    Parameters are gathered ahead until the window is full, each whole: the last of them can stand out. What a module
    needs is gathered whether the window has room or not: the head comes when the layers fill it. A chunked loss finds
    a head that it shares with the embedding still there. In the second pass of the first step a plain loss's head comes
    in one buffer with others, out of which it is copied. Parameters that wait on the host are copied to the card shard
    by shard first.
    """
    zero = config.zero
    assert zero is not None
    ranks = config.world_size if zero.offload_param is not Offload.NONE else 0
    window = min(counts.total, max(zero.max_live_elements, counts.largest_module + zero.prefetch_elements))
    if zero.prefetch_elements:
        window = min(
            counts.total, window + max(one.weight_params for group in model.groups for one in group.block.linears)
        )
    whole_head = model.head_params
    if model.tied and config.loss is LossHead.PLAIN:
        whole_head = model.embedding_params
    head = min(whole_head, counts.total - window)
    copied = head if config.loss is LossHead.PLAIN and config.gradient_accumulation_steps > 1 else 0
    if zero.offload_optimizer is Offload.NONE:  # nor are there moments yet
        copied = max(0, copied - zero.moment_bytes * ceil_div(counts.trainable, config.world_size))
    apart = min(head + copied, counts.total - window) + (ceil_div(head, ranks) if ranks else 0)
    saved = counts.largest_module + (ceil_div(counts.largest_module, ranks) if ranks else 0)
    return [
        gpu_entry(
            "gathered-parameters",
            Account.WORKSPACE,
            2 * window,
            TRAINING - _STEP | {Moment.EVALUATE},
            f"2 B x {window} elements: stage3_max_live_parameters and one linear, at most the model",
            "DeepSpeed partitioned_param_coordinator.py",
        ),
        cached_entry(
            "gather-stream",
            Account.WORKSPACE,
            2 * apart,
            TRAINING - _STEP | {Moment.EVALUATE},
            f"2 B x {apart} elements: the head, gathered beside a full window"
            + (", and copied out of a buffer" if copied else "")
            + (", and its shard on the way from the host" if ranks else ""),
            "DeepSpeed partitioned_param_coordinator.py _fetch_sub_module_impl, partition_parameters.py "
            "_all_gather_sequential, AllGatherCoalescedHandle.wait; torch CUDACachingAllocator.cpp",
        ),
        cached_entry(
            "gather-stream-in-step",
            Account.WORKSPACE,
            2 * (window + apart),
            _STEP,
            f"2 B x {window + apart} elements that parameters were gathered into, of use to that stream alone",
            "DeepSpeed partition_parameters.py; torch CUDACachingAllocator.cpp",
        ),
        gpu_entry(
            "module-being-saved",
            Account.WORKSPACE,
            2 * saved,
            frozenset({Moment.SAVE}),
            f"2 B x {saved} elements of the largest module, whole on its way to the host"
            + (", and its shard" if ranks else ""),
            "deepspeed engine.py _zero3_consolidated_16bit_state_dict, zero.GatheredParameters",
        ),
    ]


def _buckets(zero: ZeroConfig) -> list[Entry]:
    """Returns the buckets of the gradients' reduction: two where it runs beside backward, below stage 3."""
    if not zero.stage:
        return []
    copies, bucket = 2 if zero.overlap_comm and zero.stage < 3 else 1, zero.reduce_bucket_elements
    return [
        gpu_entry(
            "reduce-buckets",
            Account.WORKSPACE,
            2 * bucket * copies,
            BACKWARD if zero.stage < 3 else ALWAYS,
            f"{copies} x 2 B x {bucket} elements",
            "DeepSpeed ipg_buckets",
        )
    ]
