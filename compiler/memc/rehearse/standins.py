"""What takes the place of code that works in memory which nothing may touch, or needs what the planned machine has.

Each is put in place right after the module that holds it was imported, and only in the rehearsed process.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import json
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As the header of a safetensors file names types."""


def _safetensors(module: ModuleType) -> None:
    """Files of tensors get their real header and no content: they can be read back, as zeros, and take no room."""

    def saved(
        tensors: dict[str, torch.Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
    ) -> None:
        header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        end = 0
        for name, tensor in tensors.items():
            start, end = end, end + tensor.numel() * tensor.element_size()
            kind = _SAFETENSORS[tensor.dtype]
            header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with Path(filename).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)

    module.save_file = saved  # type: ignore[attr-defined]


def forget_sums(arguments: Iterable[object]) -> None:
    """Says that a kernel which torch does not know of may have written to these: nothing is known of sums any more."""
    mark = ctypes.CDLL(None).phantom_mark
    for tensor in arguments:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.is_floating_point():
            storage = tensor.untyped_storage()
            mark(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), 0)


def _launch(self: object, *args: object, **kwargs: object) -> None:
    """Takes the place of a Triton kernel: nothing is compiled, nothing is computed."""
    forget_sums([*args, *kwargs.values()])


def _triton(module: ModuleType) -> None:
    module.JITFunction.run = _launch


def _autotuned(module: ModuleType) -> None:
    module.Autotuner.run = _launch


class HostAdam:
    """DeepSpeed's Adam in C++, without the arithmetic: states are made as always, and stay as they are."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Returns the function of this name, which does nothing."""
        return lambda *args, **kwargs: 0


def _built_operations(module: ModuleType) -> None:
    """DeepSpeed finds what it would compile to work on the host as if it were loaded already."""
    module.OpBuilder._loaded_ops["cpu_adam"] = HostAdam()


def _plans_of_its_own(module: ModuleType) -> None:
    """Makes every rank the one that plans a sharded checkpoint: from the other ranks nothing can come back."""
    start = module._DistWrapper.__init__

    def alone(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        own = torch.distributed.get_rank(group) if use_dist else coordinator_rank
        start(self, group, use_dist, own)

    module._DistWrapper.__init__ = alone


def _plans_of_one(module: ModuleType) -> None:
    """Lets a sharded checkpoint pass of which only this rank's shards are known."""
    answers = str(module._validate_global_plan.__annotations__.get("return"))
    valid: object = [] if "list" in answers else True
    module._validate_global_plan = lambda plan, metadata: valid  # type: ignore[attr-defined]


def _agreeing(module: ModuleType) -> None:
    """DeepSpeed's ranks ask each other whether they do the same; from rank 0 no answer comes back."""
    for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        if hasattr(module, name):
            setattr(module, name, lambda values: None)


def _weights_of_rank_0(module: ModuleType) -> None:
    """Where rank 0 would have written random weights, any other rank writes them itself before it reads them."""
    read = module._BaseAutoModelClass.from_pretrained.__func__

    def written_first(cls: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK", "0") != "0" and Path(source).is_absolute() and not Path(source).exists():
            kept = ("dtype", "attn_implementation", "trust_remote_code")
            settings = {name: kwargs[name] for name in kept if name in kwargs}
            made = cls.from_config(kwargs["config"], **settings)
            made.should_save_on_this_rank = lambda is_main_process: True
            made.save_pretrained(source)
        return read(cls, source, *args, **kwargs)

    module._BaseAutoModelClass.from_pretrained = classmethod(written_first)


WHEN_IMPORTED: dict[str, Callable[[ModuleType], None]] = {
    "safetensors.torch": _safetensors,
    "triton.runtime.jit": _triton,
    "triton.runtime.autotuner": _autotuned,
    "deepspeed.ops.op_builder.builder": _built_operations,
    "deepspeed.runtime.zero.utils": _agreeing,
    "torch.distributed.checkpoint.default_planner": _plans_of_one,
    "torch.distributed.checkpoint.utils": _plans_of_its_own,
    "transformers.models.auto.auto_factory": _weights_of_rank_0,
}
"""Module → what is changed in it right after it was imported."""


class Changes(importlib.abc.MetaPathFinder):
    """Finds the modules of `WHEN_IMPORTED` as always and changes them once they are there."""

    def __init__(self, others: Callable[[], Iterable[Any]]) -> None:
        self._others = others

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the spec that the other finders have, with a loader that changes the module after it ran."""
        change = WHEN_IMPORTED.get(name)
        if change is None:
            return None
        for finder in self._others():
            if finder is self:
                continue
            found: ModuleSpec | None = finder.find_spec(name, path, target)
            if found is not None and found.loader is not None:
                _change_after(found.loader, change)
                return found
        return None


def _change_after(loader: Any, change: Callable[[ModuleType], None]) -> None:
    run = loader.exec_module

    def then(module: ModuleType) -> None:
        run(module)
        change(module)

    loader.exec_module = then
