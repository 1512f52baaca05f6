"""CUDA semantics on tensors without data: which kernels run, what they keep, and answers where code reads values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers.utils.import_utils as transformers_imports
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_MASK_ALIGNMENT = 16
_FLASH_MAX_WIDTH = 256
_original_attention = torch.nn.functional.scaled_dot_product_attention
_original_dropout = torch.nn.functional.dropout


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what depends on values that a tensor without data has not.

    Every label counts (the most expensive batch); a padding mask is not all ones when `padded`; nothing overflows.
    """

    def __init__(self, *, padded: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._padded = padded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, or replaces it by one whose output has the shape that the assumed values give."""
        if func is aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if func is aten.index.Tensor and _is_mask(args[1]):
            return _select(args[0], args[1][0])
        if func in (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default) and _is_mask(
            args[1]
        ):
            return _write(func, args)
        if func is aten.masked_select.default:
            return args[0].new_empty((args[0].numel(),))
        return func(*args, **(kwargs or {}))

    def _scalar(self, tensor: torch.Tensor) -> bool | int | float:
        if tensor.dtype is torch.bool:
            return not self._padded
        return 1.0 if tensor.dtype.is_floating_point else 1


def _is_mask(indices: Any) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype is torch.bool


def _select(source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns source[mask] for a mask that is true everywhere; positions are found as int64 first."""
    positions = source.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)
    rows = source.new_empty((mask.numel(), *source.shape[mask.dim() :]))
    del positions
    return rows


def _write(func: Any, args: Any) -> torch.Tensor:
    mask = args[1][0]
    positions = args[0].new_empty((mask.numel(), mask.dim()), dtype=torch.int64)
    order = [args[0].new_empty((mask.numel(),), dtype=torch.int64) for _ in range(3)]
    del positions, order
    target: torch.Tensor = args[0]
    return target if func is not aten.index_put.default else aten.clone.default(target)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Returns what `scaled_dot_product_attention` gives on compute capability 8 or 9, through the same kernel.

    Assumes: cuDNN attention is not chosen, which torch may do on capability 9 and 10; its workspace is not known here.
    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (order flash, memory-efficient, math) and
        transformers/attention.cpp (padding of head widths and masks).
    """
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(half), key.to(half), value.to(half)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(half)
    width = query.shape[-1]
    factor = scale if scale is not None else 1 / math.sqrt(width)
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if is_half and attn_mask is None and width <= _FLASH_MAX_WIDTH and value.shape[-1] == width:
        return _flash(query, key, value, dropout_p, is_causal, factor)
    if enable_gqa:
        return _original_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    out: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=factor
    )[0]
    return out


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, causal: bool, factor: float
) -> torch.Tensor:
    width = query.shape[-1]
    padding = -width % 8
    if padding:
        query, key, value = (torch.nn.functional.pad(t, (0, padding)) for t in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=factor
    )[0]
    return out[..., :width] if padding else out


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns the additive, aligned, expanded mask that the memory-efficient kernel takes."""
    if mask.dtype is torch.bool:
        zeros = torch.zeros_like(mask, dtype=query.dtype)
        mask = zeros.masked_fill_(mask.logical_not(), float("-inf"))
    columns = mask.shape[-1]
    if columns % _MASK_ALIGNMENT:
        mask = torch.nn.functional.pad(mask, (0, -columns % _MASK_ALIGNMENT))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def dropout(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Returns dropped-out values, with a bool mask as on CUDA (aten/src/ATen/native/Dropout.cpp, the fused kernel)."""
    if training and 0 < p < 1 and not inplace:
        out: torch.Tensor = torch.native_dropout(tensor, p, True)[0]
        return out
    return _original_dropout(tensor, p, training, inplace)


class _Launch:
    """Stands for a Triton kernel: it allocates nothing and runs nothing."""

    def __getitem__(self, grid: object) -> _Launch:
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None


def _add_product(accumulator: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Stands for a matrix product with fp32 output into `accumulator`, which allocates nothing on CUDA."""
    accumulator.add_(0)


class _Triton:
    """Stands for the triton module, of which only the arithmetic is used."""

    @staticmethod
    def cdiv(numerator: int, denominator: int) -> int:
        """Returns the quotient, rounded up."""
        return -(-numerator // denominator)


def _fused_head_replacements() -> list[tuple[Any, str, Any]]:
    """Returns what makes TRL's fused head take the path of a GPU with Triton; empty when TRL is not installed."""
    try:
        import trl.kernels.chunked_logprob as head
        import trl.trainer.utils as trainer
    except ImportError:
        return []
    return [
        (head, "_use_triton", lambda device: True),
        (trainer, "_use_triton", lambda device: True),
        (head, "_forward_kernel", _Launch()),
        (head, "_backward_kernel", _Launch()),
        (head, "_addmm_fp32", _add_product),
        (head, "triton", _Triton),
    ]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives `owner` another attribute for a while."""
    missing = object()
    before = getattr(owner, name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def cuda_semantics(*, padded: bool, like_cuda: bool = True, without_data: bool = True) -> Iterator[None]:
    """Makes tensors behave as on a GPU (`like_cuda`) and without storage behind them (`without_data`) for a while."""
    functional = torch.nn.functional
    replacements: list[tuple[Any, str, Any]] = []
    if like_cuda:
        replacements = [(functional, "scaled_dot_product_attention", attention), (functional, "dropout", dropout)]
        replacements += _fused_head_replacements()
    if without_data:
        replacements.append((transformers_imports, "is_fake_tensor", lambda tensor: False))
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(_replaced(owner, name, value))
        if without_data:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(Answers(padded=padded))
        yield
