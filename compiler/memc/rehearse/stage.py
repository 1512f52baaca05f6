"""Runs a script as one rank on the phantom card, with what no card is needed for left out.

Left out: drawing random weights (the values decide no size), what other ranks would send (torch's own fake process
group), the bytes of files that are saved (their tensors are made as always), Triton's kernels and DeepSpeed's Adam on
the host, which compute in memory that nothing may touch, or that a small machine does not have.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_DRAWN = (
    "constant_",
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "sparse_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
)

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


def leave_weights_undrawn() -> None:
    """Keeps torch.nn.init from filling tensors: pages of the host that nobody writes to take no memory."""

    def unfilled(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return tensor

    for name in _DRAWN:
        setattr(torch.nn.init, name, unfilled)


def play_alone(rank: int, world_size: int) -> None:
    """Makes every process group one whose other ranks do nothing: collectives return at once, in whole buffers."""
    from torch.distributed import distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start = distributed_c10d.init_process_group

    def alone(backend: object = None, *args: object, **kwargs: object) -> None:
        start(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)

    distributed_c10d.init_process_group = torch.distributed.init_process_group = alone


def keep_small_data_true() -> None:
    """Has operations on small data of the host done for real, so that what the script decides by it is decided rightly.

    See shadow.cpp. It looks at what this thread does, and at the backward passes that it starts.
    """
    ctypes.CDLL(os.environ["MEMC_PHANTOM_SHADOW"]).shadow_begin()


def forget_sums(arguments: Iterable[object]) -> None:
    """Says that a kernel which torch does not know of may have written to these: nothing is known of sums any more."""
    mark = ctypes.CDLL(None).phantom_mark
    for tensor in arguments:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.is_floating_point():
            storage = tensor.untyped_storage()
            mark(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), 0)


def save_nothing() -> None:
    """Keeps files from being filled; that they are there is all that later code asks."""

    def saved(value: object, file: Any, *args: object, **kwargs: object) -> None:
        if isinstance(file, (str, os.PathLike)):
            Path(file).touch()

    setattr(torch, "save", saved)  # noqa: B010  (a plain assignment must have the type of what it replaces)


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


def _launch(self: object, *args: object, **kwargs: object) -> None:
    """Takes the place of a Triton kernel: nothing is compiled, nothing is computed."""
    forget_sums([*args, *kwargs.values()])


def _triton(module: ModuleType) -> None:
    module.JITFunction.run = _launch


def _autotuned(module: ModuleType) -> None:
    module.Autotuner.run = _launch


def _host_adam(module: ModuleType) -> None:
    module.DeepSpeedCPUAdam.step = lambda self, closure=None: None


WHEN_IMPORTED: dict[str, Callable[[ModuleType], None]] = {
    "safetensors.torch": _safetensors,
    "triton.runtime.jit": _triton,
    "triton.runtime.autotuner": _autotuned,
    "deepspeed.ops.adam.cpu_adam": _host_adam,
}
"""Module → what is changed in it right after it was imported."""


class _Changes(importlib.abc.MetaPathFinder):
    """Finds the modules of `WHEN_IMPORTED` as always and changes them once they are there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the spec that the other finders have, with a loader that changes the module after it ran."""
        change = WHEN_IMPORTED.get(name)
        if change is None:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            found = finder.find_spec(name, path, target)
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


def main() -> None:
    """Prepares the process and runs the script that the command line names, with its arguments."""
    script = sys.argv[1]
    leave_weights_undrawn()
    keep_small_data_true()
    save_nothing()
    sys.meta_path.insert(0, _Changes())
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        play_alone(int(os.environ["RANK"]), world_size)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
