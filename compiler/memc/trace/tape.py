"""The tape: every storage of a run, when it is allocated and when it is freed, and what ran at that time."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memc.trace.records import Block, Event, Kernel, Owner, Part, Recording, Region, Stage

Answer = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""Stands for an operator, in terms of others that the tape sees; returns NotImplemented to let it run as it is."""

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an operator below the tape."""


_device = torch.ops.prim.device.default
_add = torch.ops.aten.add.Tensor
_FILLS = frozenset(
    {
        torch.ops.aten.index_put.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter_add.default,
        torch.ops.aten.masked_scatter.default,
    }
)
"""What backward formulas write into fresh zeros with: in place, but out of place under a dispatch mode.

Source: torch/csrc/autograd/FunctionsManual.cpp (index_backward, value_selecting_reduction_backward, gather_backward),
where areAnyTensorSubclassLike chooses.
"""
_cast = torch.ops.aten._to_copy.default
_OUTSIDE = Region(Part.BELOW)
_SEEN = "followed by a tape"


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of all tensors that operators return, from allocation to release.

    Under any dispatch mode the autograd engine adds gradients out of place, while without one it adds them into the
    older buffer when nobody else holds it (torch/csrc/autograd/input_buffer.cpp, accumulate_grad.h). The tape puts
    that back: a sum whose first operand dies right after it is recorded as living in the operand's block.

    Args:
        kernels: By operator, the buffers that its CUDA kernel allocates for itself.
        answers: By operator, what CUDA runs in its place.
        run: Runs an operator; calls it when not given.

    Attributes:
        blocks: Every storage seen, in order of allocation.
        events: Allocations and releases, in order.
        stages: What the loop was doing, in order; events refer to it by position.
        owners: What a block holds, for those that have been claimed.
        lists: For blocks that the optimizer makes of a list of tensors, how many of them belong where.
    """

    def __init__(
        self,
        kernels: Mapping[Any, Kernel] | None = None,
        answers: Mapping[Any, Answer] | None = None,
        run: Run = _call,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[Block] = []
        self.events: list[Event] = []
        self.stages: list[Stage] = [Stage.LOAD]
        self.owners: dict[int, Owner] = {}
        self._kernels = kernels or {}
        self._answers = answers or {}
        self._run = run
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._merged: dict[int, int] = {}
        self._pending: tuple[int, int] | None = None
        self._entered: list[tuple[str, Region]] = [("", _OUTSIDE)]
        self._backward: tuple[str, Region] = ("", _OUTSIDE)
        self._of_input: Region | None = None
        self._closed = False
        self.lists: dict[int, Counter[Region]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing is compiled here, and torch's guard of that costs more than a tape does."""
        return False

    def _where(self) -> tuple[str, Region]:
        if self.stages[-1] is Stage.BACKWARD:
            return self._backward
        name, region = self._entered[-1]
        return name, self._of_input or region

    def enter(self, stage: Stage) -> None:
        """Starts a stage."""
        self._settle()
        self.stages.append(stage)
        self._backward = ("", _OUTSIDE)

    def claim(self, tensors: Iterable[torch.Tensor | None], owner: Owner, of: torch.Tensor | None = None) -> None:
        """Says what the storages of `tensors` hold, and that they belong to the layer of `of`.

        The first claim on a block stands.
        """
        source = None if of is None else self.block_of(of)
        for tensor in tensors:
            if tensor is None:
                continue
            block = self._record(tensor, owner.value)
            if block not in self.owners:
                self.owners[block] = owner
                if source is not None:
                    made = self.blocks[source]
                    self.blocks[block].region, self.blocks[block].module = made.region, made.module

    outside = _OUTSIDE

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the block that holds `tensor`; None for one that was never seen."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0]

    @contextmanager
    def inside(self, module: str, region: Region) -> Iterator[None]:
        """Says that what runs meanwhile belongs to a module."""
        self._entered.append((module, region))
        try:
            yield
        finally:
            self._entered.pop()

    def follow_modules(self, model: torch.nn.Module, regions: Mapping[str, Region]) -> None:
        """Lets events know their module, in forward through hooks and in backward through the nodes of the graph.

        `regions` has the modules inside layers, by name. What a layer calls outside itself belongs to the layer.
        """
        for name, module in model.named_modules():
            region = regions.get(name)
            module.register_forward_pre_hook(self._open(name, region))
            module.register_forward_hook(self._close(), always_call=True)

    def _open(self, name: str, region: Region | None) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: object) -> None:
            self._entered.append((name, region or self._entered[-1][1]))

        return hook

    def _close(self) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: object, output: object) -> None:
            place = self._entered.pop()
            for value in (output,) if isinstance(output, torch.Tensor) else tree_iter(output):
                node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
                if node is not None and _SEEN not in node.metadata:
                    node.metadata[_SEEN] = True
                    node.register_prehook(self._arrive(place))

        return hook

    def _arrive(self, place: tuple[str, Region]) -> Callable[[tuple[torch.Tensor, ...]], None]:
        """Returns a hook for the node that made a module's output: there backward enters the innermost such module."""

        def hook(gradients: tuple[torch.Tensor, ...]) -> None:
            self._backward = place

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator, or what stands for it, and records the storages of what it returns."""
        if func is _device and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        answer = self._answers.get(func)
        if answer is not None:
            with cast("Any", self):
                out = answer(args, kwargs or {})
            if out is not NotImplemented:
                return out
        out = self._run(func, args, kwargs or {})
        if isinstance(out, torch.Tensor):
            if (func is _add and self._adds_in_place(args, out)) or (func in _FILLS and self._fills_in_place()):
                self._record_sum(args[0], out)
                return out
            self._follow_input(args)
            made = self._record(out, func)
            self._note_list(made, args)
            if func is _cast:
                self._note_weight_cast(args[0], out)
        elif isinstance(out, (tuple, list)):
            self._record_all(func, args, out)
        self._of_input = None
        kernel = self._kernels.get(func)
        if kernel is not None:
            for block in self._run_kernel(str(func), kernel(args)):
                self._note_list(block, args)
        return out

    def _record_all(self, func: Any, args: Any, out: Sequence[Any]) -> None:
        """Records outputs; those of an operator over lists belong where the input at the same place belongs."""
        pairs = args[0] if args and isinstance(args[0], (tuple, list)) and len(args[0]) == len(out) else None
        for index, value in enumerate(out):
            if isinstance(value, torch.Tensor):
                self._follow_input(args if pairs is None else (pairs[index],))
                self._record(value, func)
            elif isinstance(value, (tuple, list)):
                self._record_all(func, args, value)

    def _follow_input(self, args: Any) -> None:
        """Outside the model, in the optimizer, what an operator makes belongs to the layer of its first input."""
        if self.stages[-1] is not Stage.STEP:
            return
        first = args[0] if args else None
        block = self.block_of(first) if isinstance(first, torch.Tensor) else None
        self._of_input = None if block is None else self.blocks[block].region

    def _note_weight_cast(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        block, made = self.block_of(source), self.block_of(copy)
        if block is not None and made is not None and self.owners.get(block) is Owner.PARAMETERS:
            self.owners.setdefault(made, Owner.WEIGHT_CASTS)

    def _note_list(self, block: int, args: Any) -> None:
        """Notes, in the optimizer, to which layers the tensors belong that a block is made of."""
        if self.stages[-1] is not Stage.STEP or not args or not isinstance(args[0], (tuple, list)):
            return
        sources = [self.block_of(tensor) for tensor in args[0] if isinstance(tensor, torch.Tensor)]
        if sources:
            self.lists[block] = Counter(self.blocks[source].region for source in sources if source is not None)

    def _run_kernel(self, operator: str, sizes: Sequence[int]) -> list[int]:
        """Records buffers that a kernel allocates for itself and releases before it returns. Returns their blocks."""
        self._settle()
        made = [self._new_block(size, operator) for size in sizes if size]
        for block in made:
            self.owners[block] = Owner.KERNEL_WORKSPACE
            self._emit(block, +1)
        for block in reversed(made):
            self._emit(block, -1)
        return made

    def _adds_in_place(self, args: tuple[Any, ...], out: Any) -> bool:
        if self.stages[-1] is not Stage.BACKWARD or torch.is_grad_enabled():
            return False
        older, newer = args[0], args[1]
        return (
            isinstance(newer, torch.Tensor)
            and older.shape == newer.shape
            and older.dtype == newer.dtype == out.dtype
            and older.is_contiguous()
            and not older._is_view()
        )

    def _fills_in_place(self) -> bool:
        return self.stages[-1] is Stage.BACKWARD and not torch.is_grad_enabled()

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

    def _record(self, tensor: torch.Tensor, operator: object) -> int:
        storage = tensor.untyped_storage()
        found = self._alive.get(storage._cdata)
        if found is not None and found[1]() is not None:
            return found[0]
        self._settle()
        block = self._new_block(storage.nbytes(), str(operator))
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
        name, region = self._where()
        self.events.append(Event(block, delta, len(self.stages) - 1, region, name))

    def recorded(self) -> Recording:
        """Returns what has been written down so far."""
        return Recording(self.blocks, self.events, self.stages, self.owners, self.lists)

    def resolve(self, block: int) -> int:
        """Returns the block that really holds what `block` holds, after in-place sums."""
        return self._merged.get(block, block)

    def claim_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> list[int | None]:
        """Says that the storages of the parameters' gradients are gradients. Returns their blocks.

        None stands for a parameter without one. A gradient belongs to the module of its parameter.
        """
        self._settle()
        found: list[int | None] = []
        for parameter in parameters:
            if parameter.grad is None:
                found.append(None)
                continue
            block = self.resolve(self._record(parameter.grad, "gradient"))
            self.owners[block] = Owner.GRADIENTS
            home = self.block_of(parameter)
            if home is not None:
                self.blocks[block].module = self.blocks[home].module
                if self.stages[-1] is Stage.STAND_IN:
                    self.blocks[block].region = self.blocks[home].region
            found.append(block)
        return found


@contextmanager
def recording(tape: Tape) -> Iterator[Tape]:
    """Switches the tape on. Cyclic garbage is left alone meanwhile, so that releases do not depend on its timing."""
    with garbage_left_alone():
        try:
            with cast("Any", tape):
                yield tape
        finally:
            tape.close()


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """Searches for no cyclic garbage for a while: among the many objects of a trace that takes a tenth of its time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
