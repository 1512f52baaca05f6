"""The tape: every storage of a run, when it is allocated and when it is freed, and what ran at that time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memc.trace.records import Block, Event, Kernel, Owner, Part, Region, Stage


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of all tensors that operators return, from allocation to release.

    Under any dispatch mode the autograd engine adds gradients out of place, while without one it adds them into the
    older buffer when nobody else holds it (torch/csrc/autograd/input_buffer.cpp, accumulate_grad.h). The tape puts
    that back: a sum whose first operand dies right after it is recorded as living in the operand's block.

    Attributes:
        blocks: Every storage seen, in order of allocation.
        events: Allocations and releases, in order.
        stages: What the loop was doing, in order; events refer to it by position.
        owners: What a block holds, for those that have been claimed.
    """

    def __init__(self, kernels: dict[Any, Kernel] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[Block] = []
        self.events: list[Event] = []
        self.stages: list[Stage] = [Stage.LOAD]
        self.owners: dict[int, Owner] = {}
        self._kernels = kernels or {}
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._merged: dict[int, int] = {}
        self._pending: tuple[int, int] | None = None
        self._entered: list[tuple[str, Region]] = [("", Region(Part.BELOW))]
        self._backward: tuple[str, Region] = ("", Region(Part.ABOVE))
        self._tail = False
        self._closed = False

    def _where(self) -> tuple[str, Region]:
        if self.stages[-1] is Stage.BACKWARD:
            return self._backward
        name, region = self._entered[-1]
        if region.part is not Part.LAYER:
            region = Region(Part.ABOVE if self._tail else Part.BELOW)
        return name, region

    def enter(self, stage: Stage) -> None:
        """Starts a stage; forward starts below the layers, backward above them."""
        self._settle()
        self.stages.append(stage)
        self._tail = False
        self._backward = ("", Region(Part.ABOVE))

    def claim(self, tensors: Iterable[torch.Tensor | None], owner: Owner) -> None:
        """Says what the storages of `tensors` hold. The first claim on a block stands."""
        for tensor in tensors:
            if tensor is not None:
                self.owners.setdefault(self._record(tensor, owner.value), owner)

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the block that holds `tensor`; None for one that was never seen."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0]

    def follow_modules(self, model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        """Lets events know their layer, in forward through hooks and in backward through the nodes of the graph."""
        regions = {id(child): Region(Part.LAYER, i) for i, layer in enumerate(layers) for child in layer.modules()}
        for name, module in model.named_modules():
            region = regions.get(id(module), Region(Part.BELOW))
            module.register_forward_pre_hook(self._open(name, region))
            module.register_forward_hook(self._close(name, region, module is layers[-1]), always_call=True)

    def _open(self, name: str, region: Region) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: object) -> None:
            self._entered.append((name, region))

        return hook

    def _close(self, name: str, region: Region, last: bool) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: object, output: object) -> None:
            self._entered.pop()
            if last and self.stages[-1] is Stage.FORWARD:
                self._tail = True
            here = region
            if here.part is not Part.LAYER:
                here = Region(Part.ABOVE if self._tail else Part.BELOW)
            for value in tree_iter(output):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    value.grad_fn.register_prehook(self._arrive(name, here))

        return hook

    def _arrive(self, name: str, region: Region) -> Callable[[tuple[torch.Tensor, ...]], None]:
        """Returns a hook for the node that made a module's output: there backward enters the module."""

        def hook(gradients: tuple[torch.Tensor, ...]) -> None:
            self._backward = (name, region)

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator and records the storages of what it returns."""
        out = func(*args, **(kwargs or {}))
        if self._adds_in_place(func, args, out):
            self._record_sum(args[0], out)
            return out
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self._record(value, str(func))
        if func is torch.ops.aten._to_copy.default:
            self._note_weight_cast(args[0], out)
        kernel = self._kernels.get(func)
        if kernel is not None:
            self._run_kernel(str(func), kernel(args))
        return out

    def _note_weight_cast(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        block, made = self.block_of(source), self.block_of(copy)
        if block is not None and made is not None and self.owners.get(block) is Owner.PARAMETERS:
            self.owners.setdefault(made, Owner.WEIGHT_CASTS)

    def _run_kernel(self, operator: str, sizes: Sequence[int]) -> None:
        """Records buffers that a kernel allocates for itself and releases before it returns."""
        self._settle()
        made = [self._new_block(size, operator) for size in sizes if size]
        for block in made:
            self.owners[block] = Owner.KERNEL_WORKSPACE
            self._emit(block, +1)
        for block in reversed(made):
            self._emit(block, -1)

    def _adds_in_place(self, func: Any, args: tuple[Any, ...], out: Any) -> bool:
        if func is not torch.ops.aten.add.Tensor or self.stages[-1] is not Stage.BACKWARD or torch.is_grad_enabled():
            return False
        older, newer = args[0], args[1]
        return (
            isinstance(newer, torch.Tensor)
            and older.shape == newer.shape
            and older.dtype == newer.dtype == out.dtype
            and older.is_contiguous()
            and not older._is_view()
        )

    def _record_sum(self, older: torch.Tensor, total: torch.Tensor) -> None:
        self._settle()
        block = self._new_block(total.untyped_storage().nbytes(), "aten.add.Tensor")
        self._watch(total.untyped_storage(), block)
        into = self.block_of(older)
        if into is None:
            self._emit(block, +1)
        else:
            self._pending = (block, into)

    def close(self) -> None:
        """Ends the record: what is released later is not written down."""
        self._settle()
        self._closed = True

    def _settle(self) -> None:
        """Gives a pending sum a block of its own: its first operand is still alive."""
        if self._pending is not None:
            block, self._pending = self._pending[0], None
            self._emit(block, +1)

    def _record(self, tensor: torch.Tensor, operator: str) -> int:
        storage = tensor.untyped_storage()
        found = self._alive.get(storage._cdata)
        if found is not None and found[1]() is not None:
            return found[0]
        self._settle()
        block = self._new_block(storage.nbytes(), operator)
        self._watch(storage, block)
        self._emit(block, +1)
        return block

    def _new_block(self, size_bytes: int, operator: str) -> int:
        name, region = self._where()
        self.blocks.append(Block(size_bytes, operator, len(self.stages) - 1, region, name))
        return len(self.blocks) - 1

    def _watch(self, storage: torch.UntypedStorage, block: int) -> None:
        key = storage._cdata

        def released(_: object) -> None:
            if self._closed:
                return
            current = self._alive.get(key)
            if current is not None and current[0] == block:
                del self._alive[key]
            if self._pending is not None and self._pending[1] == block:
                self._merged[self._pending[0]] = self._merged.pop(block, block)
                self._pending = None
                return
            self._settle()
            self._emit(self._merged.pop(block, block), -1)

        self._alive[key] = (block, weakref.ref(storage, released))

    def _emit(self, block: int, delta: int) -> None:
        region = self._where()[1]
        self.events.append(Event(block, delta, len(self.stages) - 1, region))

    def resolve(self, block: int) -> int:
        """Returns the block that really holds what `block` holds, after in-place sums."""
        return self._merged.get(block, block)

    def claim_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Says that the storages of the parameters' gradients are gradients."""
        self._settle()
        for parameter in parameters:
            if parameter.grad is not None:
                self.owners[self.resolve(self._record(parameter.grad, "gradient"))] = Owner.GRADIENTS


@contextmanager
def recording(tape: Tape) -> Iterator[Tape]:
    """Switches the tape on. Cyclic garbage is left alone meanwhile, so that releases do not depend on its timing."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with cast("Any", tape):
            yield tape
    finally:
        tape.close()
        if collecting:
            gc.enable()
