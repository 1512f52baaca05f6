"""Values of small integer tensors on a run without data: masks, positions, image grids and token numbers are known.

Modelling code reads some of them to decide what to run. Everything that follows from data nobody has stays unknown.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memc.trace.shapes import Shapes

aten = torch.ops.aten
_MOST_ELEMENTS = 1 << 22
_FILLED_LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
_WITHOUT_VALUES = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
}
_SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
}
_RANDOM = {aten.randint.default, aten.randint.low, aten.randperm.default, aten.bernoulli.default}
_ATTRIBUTE = "_known_values"
_original_tensor = torch.tensor


def known_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the values of a tensor without data; None when they are not known."""
    found = getattr(tensor, _ATTRIBUTE, None)
    if found is not None and found.shape != tensor.shape:
        return None
    return found


def give_values(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns `tensor`, whose values are known from now on."""
    setattr(tensor, _ATTRIBUTE, values)
    return tensor


class Values:
    """Runs operators on tensors without data, and on the values of those whose values are known."""

    def __init__(self) -> None:
        self._shapes = Shapes()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what an operator gives.

        Assumes: a scalar that is read is 1, or true, when it follows from data: nothing overflows, every label counts.
        """
        if func is aten._local_scalar_dense.default:
            return _scalar(args[0])
        if func in _SHAPED_BY_VALUES:
            return _shaped_by_values(func, args, kwargs)
        out = self._shapes.run(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            if not out.is_floating_point() and out.numel() <= _MOST_ELEMENTS:
                _follow(func, args, kwargs, out)
        elif isinstance(out, (tuple, list)) and any(_small_integers(value) for value in out):
            _follow_several(func, args, kwargs, out)
        return out


def _small_integers(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() <= _MOST_ELEMENTS


def _scalar(tensor: torch.Tensor) -> bool | int | float:
    values = known_values(tensor)
    if values is not None:
        with _disable_current_modes():
            found: bool | int | float = values.item()
            return found
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _real(value: Any) -> Any:
    """Returns an argument with values in place of tensors.

    Raises:
        LookupError: When a tensor's values are not known.
    """
    if isinstance(value, torch.Tensor):
        found = known_values(value)
        if found is None and type(value) is torch.Tensor and value.device.type == "cpu":
            found = value
        if found is None:
            raise LookupError
        return found
    if isinstance(value, (tuple, list)):
        return type(value)(_real(item) for item in value)
    return value


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an operator gives on values; None when those of an argument are not known."""
    if func in _RANDOM or func in _WITHOUT_VALUES:
        return None
    try:
        real_args, real_kwargs = _real(tuple(args)), {name: _real(value) for name, value in kwargs.items()}
    except LookupError:
        return None
    with _disable_current_modes(), torch.no_grad():
        return func(*real_args, **real_kwargs)


def _follow(func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    if func in _FILLED_LIKE:
        fill = args[1] if "full" in str(func) and "like" in str(func) else args[2] if "full" in str(func) else None
        with _disable_current_modes():
            value = fill if fill is not None else int("ones" in str(func))
            give_values(out, torch.full(out.shape, value, dtype=out.dtype))
        return
    values = _computed(func, args, kwargs)
    if isinstance(values, torch.Tensor):
        give_values(out, values)
    elif hasattr(out, _ATTRIBUTE) and func._schema.is_mutable:
        delattr(out, _ATTRIBUTE)


def _follow_several(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    values = _computed(func, args, kwargs)
    if isinstance(values, (tuple, list)):
        for tensor, value in zip(out, values, strict=True):
            if isinstance(tensor, torch.Tensor) and isinstance(value, torch.Tensor):
                give_values(tensor, value)


def _shaped_by_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the output of an operator whose shape depends on values; those that are not known count as true or 1."""
    values = _computed(func, args, kwargs)
    if isinstance(values, torch.Tensor):
        return give_values(args[0].new_empty(values.shape, dtype=values.dtype), values)
    if isinstance(values, tuple):
        return tuple(give_values(args[0].new_empty(value.shape, dtype=value.dtype), value) for value in values)
    if func is aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
    if func is aten.masked_select.default:
        mask = known_values(args[1])
        count = args[0].numel() if mask is None else int(mask.expand(args[0].shape).sum())
        return args[0].new_empty((count,))
    return func(*args, **kwargs)


def count_true(mask: torch.Tensor) -> int:
    """Returns how many elements of a mask are true: all, when they are not known."""
    values = known_values(mask)
    if values is None:
        return mask.numel()
    with _disable_current_modes():
        return int(values.sum())


def tensor_of(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stands for `torch.tensor`, which reads scalar tensors among its data below the dispatcher."""
    return _original_tensor(_plain(data), *args, **kwargs)


def _plain(data: Any) -> Any:
    if isinstance(data, torch.Tensor) and data.dim() == 0:
        return data.item()
    return [_plain(item) for item in data] if isinstance(data, (list, tuple)) else data
