"""Checkpoints that wait in host memory: saved there on their way out of a layer, copied back for its recomputation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import transformers.modeling_utils as modeling

from memc.trace.records import Owner
from memc.trace.semantics import replaced
from memc.trace.tape import Tape
from memc.trace.values import give_values, known_values


class SavedOnHost(torch.autograd.graph.saved_tensors_hooks):
    """Stands for `save_on_cpu`: what autograd saves meanwhile lies on the host, and comes back as a new block.

    Source: torch/autograd/graph.py save_on_cpu (a pinned copy of every saved tensor, `.to(device)` when it is read),
        which transformers/modeling_utils.py _activation_checkpointing_enable puts around each checkpoint (`offload`).

    Args:
        tape: Follows the blocks; those on the host are claimed as such.
        settings: What `save_on_cpu` is given: pinning and the device, which decide no block of the GPU.
    """

    def __init__(self, tape: Tape, **settings: Any) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            host = torch.empty(tensor.size(), dtype=tensor.dtype).copy_(tensor)
            tape.claim([host], Owner.HOST)
            values = known_values(tensor)
            return host if values is None else give_values(host, values)

        def unpack(host: torch.Tensor) -> torch.Tensor:
            return host.clone()

        super().__init__(pack, unpack)


def checkpoints_on_host(tape: Tape) -> AbstractContextManager[None]:
    """Lets checkpoints that a model keeps on the host leave the GPU's blocks, for a while."""
    return replaced(modeling, "save_on_cpu", partial(SavedOnHost, tape))
