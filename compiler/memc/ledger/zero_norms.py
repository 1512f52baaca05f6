"""Norms of gradients that DeepSpeed takes one by one on the GPU, in fp64, before they go to the host.

They are taken on the stream of the gradients' reduction, where it has one of its own; what they took stays with it.
"""

from __future__ import annotations

from memc.config import Offload, TrainingConfig
from memc.ledger.constants import LedgerFacts
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.parts import cached_entry, gpu_entry
from memc.ledger.states import ParamCounts
from memc.units import ceil_div

FP64_BYTES = 8
_SOURCE = "DeepSpeed stage3.py _constant_buffered_norm2, stage_1_and_2.py set_norm_for_param_grad_in_gpu"
_OTHERS = frozenset({Moment.FORWARD, Moment.LOSS, Moment.STEP, Moment.EVALUATE})


def norm_entries(
    config: TrainingConfig, counts: ParamCounts, matrices: tuple[int, ...], size: int, facts: LedgerFacts
) -> list[Entry]:
    """Returns what norms of offloaded gradients take on the GPU, and what they leave; nothing without offload.

    Source: DeepSpeed stage3.py partition_grads (a part that waits on the host is copied to the GPU),
        _constant_buffered_norm2; stage_1_and_2.py set_norm_for_param_grad_in_gpu; runtime/zero/utils.py get_norm_dtype.

    Args:
        config: With ZeRO 1, 2 or 3.
        counts: Its elements.
        matrices: Elements of each trained matrix.
        size: Bytes of one element of a gradient.
        facts: Of libraries.
    """
    zero = config.zero
    assert zero is not None
    if zero.offload_optimizer is Offload.NONE:
        return []
    layers = [one for one in matrices if one not in (counts.embedding, counts.head)]
    largest = {
        Moment.BACKWARD_FIRST_LAYER: counts.head,
        Moment.BACKWARD_LAST_LAYER: max(layers, default=0),
        Moment.BACKWARD_EMBEDDING: counts.embedding,
    }
    taken = {moment: _taken_bytes(elements, config, counts, size, facts) for moment, elements in largest.items()}
    most = max(taken.values())
    entries = []
    for moment, own in taken.items():
        name = moment.value.replace("_", "-")
        where = frozenset({moment})
        text = f"{own} B for the norm of {largest[moment]} elements, this rank's part in fp64"
        entries.append(gpu_entry(f"gradient-norm-{name}", Account.WORKSPACE, own, where, text, _SOURCE))
        entries.append(_stream(f"norm-stream-{name}", most - own if zero.overlap_comm else 0, where))
    return [*entries, _stream("norm-stream", most if zero.overlap_comm else 0, _OTHERS)]


def _taken_bytes(elements: int, config: TrainingConfig, counts: ParamCounts, size: int, facts: LedgerFacts) -> int:
    """Returns what the norm of a gradient takes: its part in fp64, and in ZeRO-3 the part itself."""
    assert config.zero is not None
    if config.zero.stage == 3:
        part = ceil_div(elements, config.world_size)
        return size * part + FP64_BYTES * min(part, facts.norm_buffer_params)
    return FP64_BYTES * min(elements, ceil_div(counts.trainable, config.world_size))


def _stream(name: str, size: int, moments: frozenset[Moment]) -> Entry:
    text = f"{size} B of the largest norm, whose memory serves its stream alone"
    return cached_entry(name, Account.WORKSPACE, size, moments, text, f"{_SOURCE}; torch CUDACachingAllocator.cpp")
