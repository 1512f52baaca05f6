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
import threading
import traceback
from collections.abc import Sequence
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


_STEPPING = ("/optim/", "/runtime/zero/", "/ops/adam/")
"""Parts of the paths of files in which a function `step` is an optimizer's."""

_LOSSES = ("loss/loss_utils.py", "trl/kernels/")
"""Parts of the paths of files that compute a loss."""


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
    for function in (all_gather_object, gather_object, scatter_object_list, broadcast_object_list):
        setattr(distributed_c10d, function.__name__, function)
        setattr(torch.distributed, function.__name__, function)
    reduce_alone()


def reduce_alone() -> None:
    """Has DistributedDataParallel take its own buckets for the sum: the fake group's answer holds no tensor."""
    from torch.nn.parallel import DistributedDataParallel

    start = DistributedDataParallel.__init__

    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.register_comm_hook(None, own_bucket)

    setattr(DistributedDataParallel, "__init__", started)  # noqa: B010  (as in save_nothing)


def own_bucket(state: object, bucket: Any) -> Any:
    """Returns the bucket's own gradients, as the result of a reduction that is done."""
    done = torch.futures.Future()  # type: ignore[var-annotated]
    done.set_result(bucket.buffer())
    return done


own_bucket.__annotations__.clear()  # as texts they are none of those that DistributedDataParallel lets pass


def all_gather_object(object_list: list[Any], obj: Any, *args: object, **kwargs: object) -> None:
    """Fills the list with what this rank has: every other rank has the like."""
    object_list[:] = [obj] * len(object_list)


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: object, **kwargs: object) -> None:
    """Fills the list, where this rank has one, with what this rank has."""
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *args: object,
    **kwargs: object,
) -> None:
    """Gives this rank its own part, where it has the list."""
    if scatter_object_input_list is not None:
        scatter_object_output_list[0] = scatter_object_input_list[torch.distributed.get_rank()]


def broadcast_object_list(object_list: list[Any], *args: object, **kwargs: object) -> None:
    """Leaves the list as it is: this rank's own is the like of all others."""


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


def tell_where_memory_ran_out(path: Path) -> None:
    """Has the place of an allocation that fails written down: what the run was doing, and what was asked for."""

    def ran_out(device: int, asked_bytes: int, *args: object) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = [] if frame is None else [one for one, _ in traceback.walk_stack(frame)][::-1]
        places = [(one.f_code.co_filename, one.f_code.co_name, one.f_locals.get("self")) for one in frames]
        path.write_text(json.dumps({"doing": doing_of(places), "asked_bytes": asked_bytes}), encoding="utf-8")

    attach: Any = torch._C
    attach._cuda_attach_out_of_memory_observer(ran_out)


def doing_of(frames: Sequence[tuple[str, str, object]]) -> str:
    """Returns which phase of a step a stack is in; empty for none of them.

    Args:
        frames: File, function and its object, the outermost first.
    """
    for place, function, _ in frames:
        if function == "_engine_run_backward":
            return "backward"
        if function.startswith("clip_grad") or (function == "step" and any(part in place for part in _STEPPING)):
            return "step"
    names = [function for _, function, _ in frames]
    if "compute_loss" not in names:
        return ""
    heads = [owner.get_output_embeddings() for _, _, owner in frames if hasattr(owner, "get_output_embeddings")]
    for place, _, owner in frames[names.index("compute_loss") :]:
        if any(part in place for part in _LOSSES) or any(owner is head for head in heads if head is not None):
            return "loss"
    return "forward"


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
    if "MEMC_PHANTOM_RAN_OUT" in os.environ:
        tell_where_memory_ran_out(Path(os.environ["MEMC_PHANTOM_RAN_OUT"]))
    sys.meta_path.insert(0, standins.Changes(lambda: list(sys.meta_path)))
    if "RANK" in os.environ:
        play_alone(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
