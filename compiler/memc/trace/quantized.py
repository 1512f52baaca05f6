"""4-bit linears as bitsandbytes stores them, without data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationMethod

from memc.config import TrainingConfig
from memc.trace.optional import library
from memc.units import ceil_div

_NF4_BLOCK = 64
_NF4_NESTED_BLOCK = 256


def quantize(model: Any, config: TrainingConfig, dtype: torch.dtype) -> None:
    """Replaces the linears that transformers replaces by 4-bit ones that compute in `dtype`; the rest stays as loaded.

    Source: transformers/quantizers/base.py get_modules_to_not_convert (the head, tied weights, what a class keeps in
        fp32), integrations/bitsandbytes.py replace_with_bnb_linear (subclasses of Linear stay as they are),
        quantizer_bnb_4bit.py (`is_loaded_in_4bit`, without which PEFT takes its adapter of plain linears).
    """
    linear_4bit = library("bitsandbytes.nn", "a 4-bit base").Linear4bit
    skipped = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    for name, child in list(model.named_modules()):
        if not (isinstance(child, Conv1D) or type(child) is torch.nn.Linear):
            continue
        if not should_convert_module(name, skipped):
            continue
        inside, outside = child.weight.shape if isinstance(child, Conv1D) else reversed(child.weight.shape)
        linear = linear_4bit(
            inside,
            outside,
            bias=child.bias is not None,
            compute_dtype=dtype,
            compress_statistics=config.double_quantization,
            quant_type="nf4",
            device="meta",
        )
        if linear.bias is not None:
            linear.bias.data = linear.bias.data.to(dtype)
        model.set_submodule(name, linear)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.is_quantized = model.is_loaded_in_4bit = True
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES


def is_packed(module: torch.nn.Module) -> bool:
    """Returns whether a module is a linear that bitsandbytes keeps in 4 bits; PEFT's adapter of one is not."""
    found: bool = isinstance(module, library("bitsandbytes.nn", "a 4-bit base").Linear4bit)
    return found


def stored_nf4(linear: Any, config: TrainingConfig, dtype: torch.dtype) -> torch.nn.Parameter:
    """Returns the packed weight of a 4-bit linear, with its quantisation state, as bitsandbytes stores it."""
    quant_state = library("bitsandbytes.functional", "a 4-bit base").QuantState
    shape = torch.Size((linear.out_features, linear.in_features))
    blocks = ceil_div(shape.numel(), _NF4_BLOCK)
    common = {"blocksize": _NF4_BLOCK, "quant_type": "nf4", "shape": shape, "dtype": dtype}
    if config.double_quantization:
        nested = quant_state(
            absmax=torch.empty(ceil_div(blocks, _NF4_NESTED_BLOCK)),
            code=torch.empty(256),
            blocksize=_NF4_NESTED_BLOCK,
            dtype=torch.float32,
        )
        absmax = torch.empty(blocks, dtype=torch.uint8)
        state = quant_state(absmax=absmax, code=torch.empty(16), offset=torch.empty(()), state2=nested, **common)
    else:
        state = quant_state(absmax=torch.empty(blocks), code=torch.empty(16), **common)
    packed = torch.empty(ceil_div(shape.numel(), 2), 1, dtype=torch.uint8)
    weight = torch.nn.Parameter(packed, requires_grad=False)
    weight.quant_state = state  # type: ignore[attr-defined]
    weight.bnb_quantized = True  # type: ignore[attr-defined]
    return weight


def quantization_constants(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Returns the tensors that belong to 4-bit weights without being parameters."""
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            for tensor in (state.absmax, state.code, state.offset):
                if isinstance(tensor, torch.Tensor):
                    yield tensor
            state = state.state2
