"""CUDA semantics on tensors without data: which kernels run, what they keep, and answers where code reads values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import transformers.utils.import_utils as transformers_imports
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from memc.trace.autocast import cuda_autocast
from memc.trace.optional import library
from memc.trace.records import Card
from memc.trace.tape import Answer
from memc.trace.values import Values, tensor_of

aten = torch.ops.aten
_MASK_ALIGNMENT = 16
_FLASH_MAX_WIDTH = 256
_original_attention = torch.nn.functional.scaled_dot_product_attention
_original_dropout = torch.nn.functional.dropout
_original_is_autocast_enabled = torch.is_autocast_enabled


def _index(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands for source[mask]: CUDA looks up the positions of a mask first (aten/src/ATen/native/IndexingUtils.h)."""
    source, indices = args
    expanded = _positions(indices)
    return NotImplemented if expanded is None else aten.index.Tensor(source, expanded)


def _positions(indices: Any) -> list[torch.Tensor | None] | None:
    """Returns indices with the positions of masks in place of masks; None when there is no mask."""
    if not any(index is not None and index.dtype is torch.bool for index in indices):
        return None
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype is not torch.bool:
            expanded.append(index)
        else:
            expanded += aten.nonzero.default(index).unbind(1)
    return expanded


def _write(operator: Any) -> Answer:
    def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, indices, *rest = args
        expanded = _positions(indices)
        return NotImplemented if expanded is None else operator(target, expanded, *rest, **kwargs)

    return answer


def _grouped_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stands for a grouped product of other than bf16, which has no meta function but runs on CUDA.

    Source: aten/src/ATen/native/GroupedMMUtils.h (_grouped_mm_fallback writes products into one output).
    """
    left, right = args[0], args[1]
    if left.dtype is torch.bfloat16:
        return NotImplemented
    offsets = args[2] if len(args) > 2 else kwargs["offs"]
    groups = (offsets.shape[0],) if left.dim() == right.dim() == 2 else ()
    return left.new_empty((*groups, left.shape[0], right.shape[-1]))


def cuda_answers() -> dict[Any, Answer]:
    """Returns, by operator, what CUDA runs in its place."""
    writes = (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
    return {
        aten.index.Tensor: _index,
        aten._grouped_mm.default: _grouped_product,
        **{operator: _write(operator) for operator in writes},
    }


class LikeCuda(Values):
    """Runs operators without data; statistics of a layer norm over halves are fp32, as on CUDA.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (acc_type), torch/_refs (cast back on CPU only).
    """

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what an operator gives on CUDA."""
        out = super().run(func, args, kwargs)
        if func is aten.native_layer_norm.default and args[0].dtype in (torch.bfloat16, torch.float16):
            return out[0], out[1].to(torch.float32), out[2].to(torch.float32)
        return out


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    has_flash: bool = True,
) -> torch.Tensor:
    """Returns what `scaled_dot_product_attention` gives on CUDA, through the same kernel.

    `has_flash` says whether the card has the flash kernel: from compute capability 8.0 on.

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
    if has_flash and is_half and attn_mask is None and width <= _FLASH_MAX_WIDTH and value.shape[-1] == width:
        return _flash(query, key, value, dropout_p, is_causal, factor)
    if enable_gqa or (is_half and key.shape[1] != query.shape[1]):
        return _original_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
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


def is_autocast_enabled(device_type: str = "cpu") -> bool:
    """Returns whether autocast is on. Without a name torch says it of CUDA, whose autocast is the CPU's here."""
    return _original_is_autocast_enabled(device_type)


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
    """Returns what makes TRL's fused head take the path of a GPU with Triton."""
    head = library("trl.kernels.chunked_logprob", "a chunked loss")
    trainer = library("trl.trainer.utils", "a chunked loss")
    return [
        (head, "_use_triton", lambda device: True),
        (trainer, "_use_triton", lambda device: True),
        (head, "_forward_kernel", _Launch()),
        (head, "_backward_kernel", _Launch()),
        (head, "_addmm_fp32", _add_product),
        (head, "triton", _Triton),
    ]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
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
def cuda_semantics(
    card: Card, *, like_cuda: bool = True, without_data: bool = True, fused_head: bool = False
) -> Iterator[None]:
    """Makes tensors behave as on a card (`like_cuda`) and without storage behind them (`without_data`) for a while.

    `fused_head` lets TRL's fused head take the path of a GPU too.
    """
    functional = torch.nn.functional
    replacements: list[tuple[Any, str, Any]] = []
    if like_cuda:
        on_card = partial(attention, has_flash=card.compute_capability >= (8, 0))
        replacements = [(functional, "scaled_dot_product_attention", on_card), (functional, "dropout", dropout)]
        replacements.append((torch, "is_autocast_enabled", is_autocast_enabled))
        replacements += _fused_head_replacements() if fused_head else []
    if without_data:
        replacements.append((transformers_imports, "is_fake_tensor", lambda tensor: False))
        replacements.append((torch, "tensor", tensor_of))
        replacements.append((MoeCausalLMOutputWithPast, "image_outputs", None))
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(replaced(owner, name, value))
        if like_cuda:
            stack.enter_context(cuda_autocast())
        if without_data:
            stack.enter_context(FakeTensorMode())
        yield
