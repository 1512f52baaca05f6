"""Outputs without data, made from what the same operator gave for inputs of the same shapes before."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_Made = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Shapes:
    """Runs operators on tensors without data, and remembers what outputs of plain ones look like.

    Plain is an operator that writes to no input and gives new tensors. Torch's own cache does the same for all kinds
    of tensors there are, which takes several times as long.
    """

    def __init__(self) -> None:
        self._made: dict[Any, list[_Made] | None] = {}
        self._plain: dict[Any, bool] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what an operator gives."""
        if not self._is_plain(func):
            return func(*args, **kwargs)
        key = _key((args, kwargs)) if kwargs else _key(args)
        mode = _mode(args)
        if key is None or mode is None:
            return func(*args, **kwargs)
        key = (func, key)
        if key not in self._made:
            out = func(*args, **kwargs)
            self._made[key] = _description(args, out)
            return out
        made = self._made[key]
        if made is None:
            return func(*args, **kwargs)
        fresh = [_new(mode, look) for look in made]
        return fresh[0] if len(func._schema.returns) == 1 else tuple(fresh)

    def _is_plain(self, func: Any) -> bool:
        found = self._plain.get(func)
        if found is None:
            schema = func._schema
            tensors = all(str(value.type) == "Tensor" and value.alias_info is None for value in schema.returns)
            found = self._plain[func] = tensors and not schema.is_mutable and len(schema.returns) > 0
        return found


def _key(value: Any) -> Any:
    """Returns what an output's shape can depend on; None when the tensors are not of the kind that is run here."""
    if isinstance(value, FakeTensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, (tuple, list)):
        parts = tuple(map(_key, value))
        return None if None in parts else parts
    if isinstance(value, dict):
        parts = tuple((name, _key(item)) for name, item in value.items())
        return None if any(part[1] is None for part in parts) else parts
    return type(value), value


def _mode(args: Any) -> Any:
    return next((value.fake_mode for value in args if isinstance(value, FakeTensor)), None)


def _description(args: Any, out: Any) -> list[_Made] | None:
    """Returns what outputs look like; None when they share storage with anything or are of an unusual kind."""
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    if not all(isinstance(value, FakeTensor) and value.device.type == "cpu" for value in outputs):
        return None
    storages = [value.untyped_storage()._cdata for value in outputs]
    inputs = [value.untyped_storage()._cdata for value in _tensors(args)]
    if len(set(storages)) < len(storages) or set(storages) & set(inputs):
        return None
    return [(value.shape, value.stride(), value.dtype) for value in outputs]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _new(mode: Any, look: _Made) -> torch.Tensor:
    shape, stride, dtype = look
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, torch.device("cpu"))
