"""The casts of CUDA's autocast on tensors that count as CPU tensors here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

# The lists of torch/include/ATen/autocast_mode.h whose operators the CPU's autocast leaves alone: AT_FORALL_FP32,
# AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_LOWER_PRECISION_FP.
_IN_FP32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm"),
    *("rms_norm", "group_norm", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"),
)
_IN_FP32_UNLESS_TOLD = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum"),
    "sum.dim_IntList",
)
_IN_HALF = ("einsum", "mv", "addmv", "addr", "chain_matmul", "linalg_multi_dot", "_convolution", "convolution")
# What only the CPU's autocast casts: on CUDA the operators that these are made of are reached, or nothing is cast.
_LEFT_ALONE = (
    *(
        "cross_entropy_loss",
        "cat",
        "stack",
        "avg_pool3d",
        "adaptive_avg_pool3d",
        "reflection_pad1d",
        "reflection_pad2d",
    ),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d", "polar", "view_as_complex", "index_copy", "stft"),
    *("grid_sampler_2d", "grid_sampler_3d", "fft_fft", "fft_rfft", "fft_irfft", "quantile"),
)

_Kernel = Callable[..., Any]


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Makes autocast on the CPU cast what it casts on CUDA, for a while."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _register(library)
        yield
    finally:
        library._destroy()


def _register(library: Any) -> None:
    for names, wrap in ((_IN_FP32, _in_fp32), (_IN_FP32_UNLESS_TOLD, _in_fp32_unless_told), (_IN_HALF, _in_half)):
        for name in names:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                library.impl(name, wrap(_operator(name)), "AutocastCPU")
    for name in _LEFT_ALONE:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64:
        return value.to(dtype)
    return value


def _in_fp32(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operator(*tree_map(lambda value: _cast(value, torch.float32), args), **kwargs)

    return kernel


def _in_fp32_unless_told(operator: Any) -> _Kernel:
    """Sets the output's type to fp32 when the caller gave none and the input is a half."""
    place = next(i for i, argument in enumerate(operator._schema.arguments) if argument.name == "dtype")
    keyword = operator._schema.arguments[place].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") if keyword or len(args) <= place else args[place]
        if given is None and args[0].is_floating_point() and args[0].dtype in (torch.float16, torch.bfloat16):
            kwargs["dtype"] = torch.float32
            args = args[:place]
        with _without_autocast():
            return operator(*args, **kwargs)

    return kernel


def _in_half(operator: Any) -> _Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with _without_autocast():
            return operator(*tree_map(lambda value: _cast(value, dtype), args), **kwargs)

    return kernel
