"""Random weights behind a model that was built on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from memc.config import Method, TrainingConfig
from memc.trace.build import base_dtype
from memc.trace.optional import library
from memc.trace.quantized import is_packed

_DEVIATION = 0.02


def fill(model: torch.nn.Module, config: TrainingConfig, device: torch.device) -> None:
    """Gives every parameter and buffer its place on `device`, with random values; tied tensors stay tied.

    Linears of a 4-bit base are quantised by bitsandbytes from random weights, as they are when a checkpoint is loaded.
    """
    made: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            if config.method is Method.QLORA and is_packed(module):
                module._parameters["weight"] = _quantised(module, config, device)
            owners: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for owner in owners:
                for name, tensor in list(owner.items()):
                    if tensor is not None and tensor.device.type == "meta":
                        if id(tensor) not in made:
                            made[id(tensor)] = _random(tensor, device)
                        owner[name] = made[id(tensor)]


def _random(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    values = torch.empty_like(tensor, device=device, requires_grad=False)
    if not values.is_floating_point():
        values.zero_()
    elif tensor.dim() == 1:
        values.fill_(0.1)
    else:
        values.normal_(0.0, _DEVIATION)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values


def _quantised(linear: Any, config: TrainingConfig, device: torch.device) -> Any:
    parameter = library("bitsandbytes.nn", "a 4-bit base").Params4bit

    plain = torch.empty(linear.out_features, linear.in_features, dtype=base_dtype(config), device=device)
    plain.normal_(0.0, _DEVIATION)
    packed, state = library("bitsandbytes.functional", "a 4-bit base").quantize_4bit(
        plain, compress_statistics=config.double_quantization, quant_type="nf4"
    )
    return parameter(
        packed,
        requires_grad=False,
        quant_state=state,
        compress_statistics=config.double_quantization,
        quant_type="nf4",
        bnb_quantized=True,
    )
