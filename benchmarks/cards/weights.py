"""Random weights behind a model that was built on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from memc.config import Method, TrainingConfig
from memc.trace.build import base_dtype

_DEVIATION = 0.02


def fill(model: torch.nn.Module, config: TrainingConfig, device: torch.device) -> None:
    """Gives every parameter and buffer its place on `device`, with random values; tied tensors stay tied.

    Linears of a 4-bit base are quantised by bitsandbytes from random weights, as they are when a checkpoint is loaded.
    """
    made: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            if config.method is Method.QLORA and type(module).__name__ == "Linear4bit":
                module._parameters["weight"] = _quantised(module, config, device)
            for owner in (module._parameters, module._buffers):
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
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Params4bit

    plain = torch.empty(linear.out_features, linear.in_features, dtype=base_dtype(config), device=device)
    plain.normal_(0.0, _DEVIATION)
    packed, state = quantize_4bit(plain, compress_statistics=config.double_quantization, quant_type="nf4")
    return Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        compress_statistics=config.double_quantization,
        quant_type="nf4",
        bnb_quantized=True,
    )
