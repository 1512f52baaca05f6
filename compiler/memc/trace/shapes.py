"""Outputs without data, made from what the same operator gave for inputs of the same shapes before."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_Made = tuple[torch.Size, tuple[int, ...], torch.dtype]
_Seen = tuple[torch.Size, tuple[int, ...], int]
_aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")
_WRITE_INTO_FIRST = frozenset(
    {_aten.copy_.default, _aten.add_.Tensor, _aten.mul_.Tensor, _aten.fill_.Scalar, _aten.zero_.default}
)
"""Operators that write values and nothing else into what they are given first, and return it."""


class Shapes:
    """Runs operators on tensors without data, and remembers what outputs of plain ones look like.

    Plain is an operator that writes to no input and gives new tensors; others give a view of what they are given first.
    Torch's own cache does the same for all kinds of tensors there are, which takes several times as long.
    """

    def __init__(self) -> None:
        self._made: dict[Any, list[_Made] | None] = {}
        self._seen: dict[Any, _Seen | None] = {}
        self._plain: dict[Any, bool] = {}
        self._views: dict[Any, bool] = {}
        self._attributes: dict[Any, dict[str, Any]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what an operator gives."""
        if not self._is_plain(func):
            if self._is_view(func) and args and isinstance(args[0], FakeTensor):
                return self._view(func, args, kwargs)
            return self._written(func, args, kwargs) if func in _WRITE_INTO_FIRST else func(*args, **kwargs)
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
        fresh = [self._new(mode, look) for look in made]
        return fresh[0] if len(func._schema.returns) == 1 else tuple(fresh)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the view that an operator gives of its first argument."""
        base = args[0]
        key = _key((args, kwargs)) if kwargs else _key(args)
        if key is None:
            return func(*args, **kwargs)
        key = (func, key, base.storage_offset() if func is _aten.as_strided.default else 0)
        if key not in self._seen:
            out = func(*args, **kwargs)
            self._seen[key] = _look(base, out)
            return out
        look = self._seen[key]
        return func(*args, **kwargs) if look is None else self._view_of(base, look)

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the first argument, which an operator has written values into."""
        key = _key((args, kwargs)) if kwargs else _key(args)
        if key is None or (func, key) not in self._made:
            out = func(*args, **kwargs)
            if key is not None and out is args[0]:
                self._made[func, key] = None
            return out
        return args[0]

    def _new(self, mode: Any, look: _Made) -> torch.Tensor:
        shape, stride, dtype = look
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        return self._fake(mode, meta)

    def _view_of(self, base: FakeTensor, look: _Seen) -> torch.Tensor:
        shape, stride, offset = look
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(0, dtype=base.dtype, device=_META)
            meta.set_(base.untyped_storage(), base.storage_offset() + offset, shape, stride)
        return self._fake(base.fake_mode, meta)

    def _fake(self, mode: Any, meta: torch.Tensor) -> torch.Tensor:
        """Returns a tensor without data over a meta tensor, as FakeTensor makes one but for what that checks.

        Attributes, which start out the same for all tensors of a mode, are those of one that FakeTensor made itself.
        """
        attributes = self._attributes.get(mode)
        if attributes is None:
            first = FakeTensor(mode, meta, _CPU)
            self._attributes[mode] = dict(vars(first))
            return first
        made: Any = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        fake: torch.Tensor = made
        return fake

    def _is_view(self, func: Any) -> bool:
        """Returns whether an operator gives one view of the first of its inputs, which no other input decides on."""
        found = self._views.get(func)
        if found is None:
            schema = func._schema
            returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
            first = schema.arguments[0].alias_info if schema.arguments else None
            found = self._views[func] = func is _aten._unsafe_view.default or (
                not schema.is_mutable
                and returned is not None
                and first is not None
                and not returned.is_write
                and str(schema.returns[0].type) == "Tensor"
                and sum("Tensor" in str(argument.type) for argument in schema.arguments) == 1
            )
        return found

    def _is_plain(self, func: Any) -> bool:
        found = self._plain.get(func)
        if found is None:
            schema = func._schema
            tensors = all(str(value.type) == "Tensor" and value.alias_info is None for value in schema.returns)
            views = func is _aten._unsafe_view.default  # its schema says nothing of that
            found = self._plain[func] = tensors and not views and not schema.is_mutable and len(schema.returns) > 0
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


def _look(base: FakeTensor, out: Any) -> _Seen | None:
    """Returns what a view looks like, its offset in its base; None when it is the tensor itself, or no view of it."""
    same = isinstance(out, FakeTensor) and out.untyped_storage()._cdata == base.untyped_storage()._cdata
    if not same or out is base or out.dtype is not base.dtype or out.device.type != "cpu":
        return None
    return out.shape, out.stride(), out.storage_offset() - base.storage_offset()
