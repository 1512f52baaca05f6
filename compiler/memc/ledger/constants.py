"""The library and driver facts that the ledger's formulas need, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from memc.facts import GpuFacts, load_fact


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """Facts about libraries and drivers on one card.

    Attributes:
        cublas_workspace_bytes: One workspace; torch makes one for the forward and one for the autograd thread.
        context_bytes: CUDA context, kernels and driver overhead of one process, outside the allocator.
        context_spread_bytes: How far above `context_bytes` measurements lie.
        nccl_bytes: NCCL channel buffers of one process, outside the allocator.
        segment_bytes: Granularity of the allocator's large pool.
        loss_tile_tokens: Tokens in one tile of the chunked loss head.
        loss_tile_vocab: Vocabulary entries in one tile.
        nf4_block_params: Elements that share one 4-bit quantisation constant.
        nf4_nested_block_params: Constants that share one constant under double quantisation.
        adam8bit_block_params: Elements that share one quantisation constant of 8-bit states.
        adam8bit_min_params: Smaller tensors keep 32-bit states.
        process_host_bytes: Resident memory of one training process before it loads anything.
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
    adam8bit_block_params: int
    adam8bit_min_params: int
    process_host_bytes: int


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
    return LedgerFacts(
        cublas_workspace_bytes=_number(workspace),
        context_bytes=context,
        context_spread_bytes=_number(measured.replace("context_bytes", "context_high_bytes")) - context,
        nccl_bytes=_number("nccl.buffer_bytes") * _number("nccl.channels") * _number("nccl.directions"),
        segment_bytes=_number("torch.allocator_large_segment_bytes"),
        loss_tile_tokens=_number("trl.head_tile_tokens"),
        loss_tile_vocab=_number("trl.head_tile_vocab"),
        nf4_block_params=_number("bitsandbytes.nf4_block_elements"),
        nf4_nested_block_params=_number("bitsandbytes.nf4_nested_block_elements"),
        adam8bit_block_params=_number("bitsandbytes.adam8bit_block_elements"),
        adam8bit_min_params=_number("bitsandbytes.adam8bit_minimum_elements"),
        process_host_bytes=_number("process.resident_bytes"),
    )


_MEASURED_CONTEXTS = ("_7_0", "_7_5", "_8_0", "_8_6", "_8_9", "_9_0", "_10_0", "_12_0")


def _number(key: str) -> int:
    return int(load_fact(key).value)
