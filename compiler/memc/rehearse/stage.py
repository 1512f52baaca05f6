"""Runs a script as one rank on the phantom card, with what no card is needed for left out.

Left out: drawing random weights (the values decide no size), what other ranks would send (torch's own fake process
group), the bytes of files that are saved (their tensors are made as always), arithmetic on large tensors of the host
(shadow.cpp), and what standins.py replaces.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memc.rehearse import standins
else:
    import standins  # this file is started by its path, so Python looks into its folder first

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

    See shadow.cpp. It looks at what this thread does, and at the backward passes that it starts. At the end it says
    what the host would have held: large tensors whose pages were never touched here, and pinned memory.
    """
    shadow = ctypes.CDLL(os.environ["MEMC_PHANTOM_SHADOW"])
    shadow.shadow_begin()
    shadow.shadow_most_host.restype = ctypes.c_size_t
    pinned = ctypes.CDLL(None).phantom_most_pinned
    pinned.restype = ctypes.c_size_t

    def report() -> None:
        sizes = {"untouched_bytes": shadow.shadow_most_host(), "pinned_bytes": pinned()}
        Path(os.environ["MEMC_PHANTOM_HOST_REPORT"]).write_text(json.dumps(sizes), encoding="utf-8")

    if "MEMC_PHANTOM_HOST_REPORT" in os.environ:
        atexit.register(report)


def save_nothing() -> None:
    """Keeps files from being filled; that they are there is all that later code asks."""

    def saved(value: object, file: Any, *args: object, **kwargs: object) -> None:
        if isinstance(file, (str, os.PathLike)):
            Path(file).touch()

    setattr(torch, "save", saved)  # noqa: B010  (a plain assignment must have the type of what it replaces)


def main() -> None:
    """Prepares the process and runs the script that the command line names, with its arguments."""
    script = sys.argv[1]
    leave_weights_undrawn()
    keep_small_data_true()
    save_nothing()
    sys.meta_path.insert(0, standins.Changes(lambda: list(sys.meta_path)))
    if "RANK" in os.environ:
        play_alone(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
