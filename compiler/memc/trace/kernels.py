"""Buffers that CUDA kernels allocate for themselves, which no dispatch mode can see, by operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from memc.trace.records import Card, Kernel
from memc.units import ceil_div, round_up

_THREADS_PER_MULTIPROCESSOR = 2048
_REDUCE_THREADS = 128
_REDUCE_VECTOR = 4
_REDUCE_MIN_ROWS = 128
_EMBEDDING_SMALL_ROWS = 3072
_FLASH_ROW_TILE = 128
_FOREACH_CHUNK = 65536


def _flash_backward(args: tuple[Any, ...]) -> Sequence[int]:
    """Returns softmax sums, the fp32 query gradient, and key/value gradients by query head when heads are grouped.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.
    """
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    padded_rows = round_up(rows, _FLASH_ROW_TILE)
    padded_width = round_up(width, 32 if width <= 128 else 64)
    sizes = [batch * heads * padded_rows * 4, batch * heads * padded_rows * padded_width * 4]
    if key.shape[1] != heads:
        sizes += [batch * key.shape[2] * heads * width * query.element_size()] * 2
    return sizes


def _efficient_backward(args: tuple[Any, ...]) -> Sequence[int]:
    """Returns the row sums and the kernel's workspace.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu, _efficient_attention_backward.
    """
    batch, heads, rows, width = args[1].shape
    return [batch * heads * rows * 4, batch * heads * (rows * round_up(width, 32) * 4 + 4 * rows)]


def _sum(multiprocessors: int, args: tuple[Any, ...]) -> Sequence[int]:
    """Returns the partial sums of a reduction over rows (gradients of norm weights and biases), and its counters.

    Source: aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig, global reduction.
    """
    tensor, dims = args[0], args[1]
    last = tensor.dim() - 1
    if not dims or last < 1 or last in [dim % tensor.dim() for dim in dims] or not tensor.is_contiguous():
        return []
    rows = prod(tensor.shape[dim] for dim in dims)
    columns = tensor.numel() // max(rows, 1)
    if columns % _REDUCE_VECTOR or columns < _REDUCE_THREADS or rows < _REDUCE_MIN_ROWS:
        return []
    grid = ceil_div(columns, _REDUCE_THREADS)
    target = multiprocessors * (_THREADS_PER_MULTIPROCESSOR // _REDUCE_THREADS)
    values_per_thread = ceil_div(rows, _REDUCE_VECTOR)
    blocks = max(min(ceil_div(target, grid), ceil_div(values_per_thread, 16)), ceil_div(values_per_thread, 256))
    if (blocks > 1 and values_per_thread >= 64) or values_per_thread >= 256:
        return [4 * columns * _REDUCE_THREADS * blocks, 4 * grid]
    return []


def _softmax_backward(args: tuple[Any, ...]) -> Sequence[int]:
    """Returns the product of gradient and output.

    Source: aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out.
    """
    return [args[0].numel() * args[0].element_size()]


def _safe_softmax(args: tuple[Any, ...]) -> Sequence[int]:
    """Returns which scores are minus infinity, one byte each, beside the probabilities.

    Source: aten/src/ATen/native/transformers/attention.cpp, _safe_softmax.
    """
    return [args[0].numel()]


def _embedding_backward(args: tuple[Any, ...]) -> Sequence[int]:
    """Returns sorted indices and the fp32 partial sums of repeated ones.

    Assumes: one token in ten begins a new partial segment; its true number depends on the tokens of the batch.
    Source: aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu.
    """
    gradient, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    if count <= _EMBEDDING_SMALL_ROWS:
        return []
    return [count * 8, count * 8, count * 24, (ceil_div(count, 10) + min(count, rows)) * gradient.shape[-1] * 4]


def _foreach_norm(args: tuple[Any, ...]) -> Sequence[int]:
    """Returns the partial norms of all tensors, as many for each as the largest has chunks.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu, foreach_tensor_norm_cuda; chunk size of MultiTensorApply.cuh.
    """
    tensors = args[0]
    chunks = max(ceil_div(tensor.numel(), _FOREACH_CHUNK) for tensor in tensors)
    return [len(tensors) * chunks * 4]


def _nested_constants(count: int) -> list[int]:
    return [4 * count, 4 * count]


def _gemm_4bit(args: tuple[Any, ...]) -> Sequence[int]:
    """Returns the 16-bit weight that a 4-bit product is computed with, and its fp32 constants.

    Assumes: more tokens than bitsandbytes' own kernel takes: 256 on any card, 64 on an H100 (1536 and 512 where the
        weight has less than 4 Mi elements).
    Source: bitsandbytes/backends/cuda/ops.py, _gemm_4bit_use_custom_cuda and _dequant_linear_fallback.
    """
    tokens, shape, constants = args[0], args[2], args[3]
    weight = prod(shape) * tokens.element_size()
    nested = ceil_div(prod(shape), args[4])
    return [*(_nested_constants(nested) if constants.numel() < nested else []), weight]


def kernel_buffers(card: Card) -> dict[Any, Kernel]:
    """Returns, by operator, a function from the operator's arguments to the sizes of its buffers in bytes."""
    aten = torch.ops.aten
    table: dict[Any, Kernel] = {
        aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
        aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
        aten.sum.dim_IntList: partial(_sum, card.multiprocessors),
        aten._softmax_backward_data.default: _softmax_backward,
        aten._safe_softmax.default: _safe_softmax,
        aten.embedding_dense_backward.default: _embedding_backward,
        aten._foreach_norm.Scalar: _foreach_norm,
    }
    if hasattr(torch.ops, "bitsandbytes") and hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        table[torch.ops.bitsandbytes.gemm_4bit.default] = _gemm_4bit
    return table
