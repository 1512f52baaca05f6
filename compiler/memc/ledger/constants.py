"""The library and driver facts that the ledger's formulas need, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memc.facts import GpuFacts, load_fact
from memc.facts.records import MeasuredFigure


class CrossEntropy(StrEnum):
    """How the loss is computed from the logits of a plain head.

    `torch`: log-softmax of the logits and its backward. `in_place`: one kernel that leaves the gradient where the
    logits were. `linear`: head and loss together, a chunk of tokens at a time (Liger). `chunks`: the head and torch's
    loss chunk by chunk of tokens, the logits of all chunks kept (LitGPT). `classes`: a few numbers for each sample, in
    place of a vocabulary for each token (sequence classification). `compiled`: torch's loss through torch.compile; it
    keeps the logits as they are and a few statistics of each token, and makes their gradient beside them.
    """

    TORCH = "torch"
    IN_PLACE = "in_place"
    LINEAR = "linear"
    CHUNKS = "chunks"
    CLASSES = "classes"
    COMPILED = "compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Behaviour of libraries where versions and kernels differ.

    The default is what memc's scripts run: the versions of specs/libraries/stack.yaml with the model's own operations.
    Published measurements ran other stacks.

    Attributes:
        cross_entropy: How the loss is computed.
        logits_upcast: Whether the loss works on an fp32 copy of 16-bit logits.
        logits_kept: Whether the 16-bit logits live beside that copy until the forward ends.
        logits_stay: Whether the program holds what the loss read while backward runs.
        shifted_copy: Whether the logits are copied once more without the last position of each sample.
        narrow_shift: Whether that copy is made of the 16-bit logits, which autocast turns to fp32 afterwards.
        keeps_keys: Whether checkpointed layers hand out the product that holds keys and values, for a cache that
            nobody reads.
        fused_norm: Whether norms run as one kernel that keeps its input only.
        fused_swiglu: Whether the gate's activation and its product with the other branch run as one kernel.
        fused_rotary: Whether rotary embedding is applied in place.
        fused_adapters: Whether the adapters of one input run as one autograd function.
    """

    cross_entropy: CrossEntropy = CrossEntropy.TORCH
    logits_upcast: bool = True
    logits_kept: bool = True
    logits_stay: bool = False
    shifted_copy: bool = False
    narrow_shift: bool = False
    keeps_keys: bool = False
    fused_norm: bool = False
    fused_swiglu: bool = False
    fused_rotary: bool = False
    fused_adapters: bool = False


MEMC_STACK = Stack()
_CONTEXT_SOURCE = "specs/libraries/cuda.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """Facts about libraries and drivers on one card.

    Attributes:
        cublas_workspace_bytes: One workspace; torch makes one for the forward and one for the autograd thread.
        context_bytes: CUDA context, kernels and driver overhead of one process, outside the allocator.
        context_spread_bytes: How far the farthest measurement lies from `context_bytes`, on either side.
        context_source: Where the two come from.
        nccl_bytes: NCCL channel buffers of one process, outside the allocator.
        segment_bytes: Granularity of the allocator's large pool.
        loss_tile_tokens: Tokens in one tile of the chunked loss head.
        loss_tile_vocab: Vocabulary entries in one tile.
        nf4_block_params: Elements that share one 4-bit quantisation constant.
        nf4_nested_block_params: Constants that share one constant under double quantisation.
        gptq_group_rows: Inputs of a linear that share a scale and a zero in GPTQ's usual packing.
        adam8bit_block_params: Elements that share one quantisation constant of 8-bit states.
        adam8bit_min_params: Smaller tensors keep 32-bit states.
        process_host_bytes: Resident memory of one training process before it loads anything.
        norm_buffer_params: Elements of a gradient that ZeRO-3 turns to fp64 at once for its norm.
        capacity_bytes: Memory of the card as torch sees it; 0 when unknown.
        stack: What the libraries of the run do where versions and kernels differ.
    """

    cublas_workspace_bytes: int
    context_bytes: int
    context_spread_bytes: int
    nccl_bytes: int
    segment_bytes: int
    loss_tile_tokens: int
    loss_tile_vocab: int
    nf4_block_params: int
    nf4_nested_block_params: int
    gptq_group_rows: int
    adam8bit_block_params: int
    adam8bit_min_params: int
    process_host_bytes: int
    norm_buffer_params: int
    capacity_bytes: int = 0
    stack: Stack = MEMC_STACK
    context_source: str = _CONTEXT_SOURCE


def ledger_facts(gpu: GpuFacts) -> LedgerFacts:
    """Returns the facts for one card, from specs/libraries.

    Raises:
        MemcError: ``fact-unknown`` when one is missing.
    """
    capability = gpu.compute_capability
    major = capability[0] if capability else 0
    suffix = f"_{major}_{capability[1]}" if capability else ""
    workspace = f"cublas.workspace_bytes_major_{major}" if major in (9, 10, 12) else "cublas.workspace_bytes"
    measured = f"cuda.context_bytes{suffix}" if suffix in _MEASURED_CONTEXTS else "cuda.context_bytes"
    context = _number(measured)
    spread = max(
        _number(measured.replace("context_bytes", "context_high_bytes")) - context,
        context - _number(measured.replace("context_bytes", "context_low_bytes")),
    )
    source = _CONTEXT_SOURCE
    if (own := gpu.measured("context_bytes")) is not None:
        context, spread = round(own.median), _own_spread(own, spread)
        source = f"median of {own.count} measured on this card by the user"
    return LedgerFacts(
        cublas_workspace_bytes=_number(workspace),
        context_bytes=context,
        context_spread_bytes=spread,
        context_source=source,
        nccl_bytes=_number("nccl.buffer_bytes") * _number("nccl.channels") * _number("nccl.directions"),
        segment_bytes=_number("torch.allocator_large_segment_bytes"),
        loss_tile_tokens=_number("trl.head_tile_tokens"),
        loss_tile_vocab=_number("trl.head_tile_vocab"),
        nf4_block_params=_number("bitsandbytes.nf4_block_elements"),
        nf4_nested_block_params=_number("bitsandbytes.nf4_nested_block_elements"),
        gptq_group_rows=_number("gptq.group_rows"),
        adam8bit_block_params=_number("bitsandbytes.adam8bit_block_elements"),
        adam8bit_min_params=_number("bitsandbytes.adam8bit_minimum_elements"),
        process_host_bytes=_number("process.resident_bytes"),
        norm_buffer_params=_number("deepspeed.norm_buffer_elements"),
        capacity_bytes=gpu.capacity_bytes or 0,
    )


_MEASURED_CONTEXTS = ("_7_0", "_7_5", "_8_0", "_8_6", "_8_9", "_9_0", "_10_0", "_12_0")


def _own_spread(own: MeasuredFigure, published_bytes: int) -> int:
    """Returns how far a context may lie from the median of a user's own measurements.

    The next of n + 1 equally likely values is the smallest or the largest with probability 2 / (n + 1): what n of them
    span is believed where that is a tenth at most; fewer leave the published spread.

    Source: order statistics of exchangeable values.
    """
    spanned = round(max(own.maximum - own.median, own.median - own.minimum))
    return spanned if 2 / (own.count + 1) <= _LEFT_OUTSIDE else max(spanned, published_bytes)


_LEFT_OUTSIDE = 0.1


def _number(key: str) -> int:
    return int(load_fact(key).value)
