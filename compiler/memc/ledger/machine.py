"""An abstract run of a block: tensors that have a size and no data, and the tape of their storages.

A program's functions are run statement by statement. Locals keep what they hold until they are given another value or
their function returns, as Python frames do, and the arguments of a call live until it returns. Operations allocate
tensors and record what autograd keeps for backward; `backward` then runs the recorded nodes as torch's engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from memc.ledger.program import Expression, Function, ProgramError, Statement

LAST = 1 << 60
_PIECES = 3
ACTIVATIONS, GRADIENTS, CASTS, WORKSPACE = "activations", "gradients", "casts", "workspace"


class Storage:
    """One allocation: `size` bytes times the value of `unit`, a product of shape variables such as ``B*T``."""

    __slots__ = ("account", "index", "more", "name", "references", "size", "unit")

    def __init__(self, index: int, unit: Any, size: int, name: str, account: str) -> None:
        self.index, self.unit, self.size, self.name, self.account = index, unit, size, name, account
        self.references = 1
        self.more: Storage | None = None  # what stands for storages like this one, and goes with it


class Tensor:
    """A view of a storage.

    Attributes:
        storage: Where it lies.
        unit: Product of shape variables; it has `width` elements for each.
        width: Elements per unit.
        last: Size of its last dimension.
        item: Bytes of one element.
        transposed: Whether heads come before tokens in its dimensions.
        head_major: Whether heads come before tokens in memory.
        is_view: Whether it is a view that holds its base (which autograd cannot add into).
        node: What made it, for backward; None when nothing does.
        slot: Which output of `node` it is.
        references: Locals, temporaries and buffers that hold it.
    """

    __slots__ = (
        "head_major",
        "is_view",
        "item",
        "last",
        "node",
        "references",
        "slot",
        "storage",
        "transposed",
        "unit",
        "width",
    )

    def __init__(self, storage: Storage, unit: str, width: int, last: int, item: int) -> None:
        self.storage, self.unit, self.width, self.last, self.item = storage, unit, width, last, item
        self.transposed = self.head_major = self.is_view = False
        self.node: Node | None = None
        self.slot = 0
        self.references = 1

    @property
    def needs_grad(self) -> bool:
        """Whether backward reaches it."""
        return self.node is not None

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie in the order of its dimensions."""
        return self.transposed == self.head_major


Gradients: TypeAlias = "Sequence[Tensor | None]"
Backward: TypeAlias = "Callable[[Machine, Gradients], list[Tensor | None]]"


class Node:
    """One step of backward: what it keeps and where its gradients go.

    Attributes:
        sequence: Order of creation; later ones run first.
        edges: Node and slot of each differentiable input; None where no gradient is wanted.
        saved: Storages kept until it has run.
        run: Returns the gradient of each edge, given those of its outputs.
        references: Tensors and nodes that need it.
        received: Gradients of its outputs that have arrived.
        waiting: Gradients still to come, while backward runs.
        packed: Whether it keeps anything, a parameter included: the first such asks for a checkpointed layer's
            recomputation.
    """

    __slots__ = ("edges", "packed", "received", "references", "run", "saved", "sequence", "waiting")

    def __init__(self, sequence: int, edges: list[tuple[Node, int] | None], run: Backward) -> None:
        self.sequence, self.edges, self.run = sequence, edges, run
        self.saved: list[Storage] = []
        self.references = 0
        self.received: dict[int, Tensor] = {}
        self.waiting = 0
        self.packed = False


class Machine:
    """Runs functions, then backward, and writes the tape.

    Attributes:
        tape: Index of a storage for its allocation, its complement for its release, in order.
        storages: All storages, by index.
        saving: Whether nodes keep what they need (not in the forward of a checkpointed layer).
        grad: Whether nodes are recorded at all.
        last_save: Length of the tape when something was last kept.
        first_use: Length of the tape when backward first used something kept; None before.
        names: What names of a program stand for beside locals: sizes, switches, weights.
        cache: Copies of weights in the compute type that autocast holds until the forward ends.
        frees_early: Whether backward runs on what checkpointing has made again (see `give_up_saved`).
    """

    def __init__(
        self,
        functions: dict[str, Function],
        operations: dict[str, Callable[..., Any]],
        names: dict[str, Any],
        *,
        saving: bool = True,
        grad: bool = True,
    ) -> None:
        self.functions, self.operations, self.names = functions, operations, names
        self.saving, self.grad = saving, grad
        self.tape: list[int] = []
        self.storages: list[Storage] = []
        self.last_save = 0
        self.first_use: int | None = None
        self.cache: dict[Any, Tensor] = {}
        self._sequence = 0
        self.frees_early = False
        self._running: Node | None = None
        self._kept: list[Storage] | None = None

    def new(self, unit: Any, width: int, item: int, name: str, *, last: int = 0, account: str = ACTIVATIONS) -> Tensor:
        """Returns a freshly allocated tensor of `width` elements of `item` bytes per `unit`."""
        storage = Storage(len(self.storages), unit, width * item, name, account)
        self.storages.append(storage)
        self.tape.append(storage.index)
        return Tensor(storage, unit, width, last or width, item)

    def outside(
        self, unit: Any, width: int, item: int, name: str, *, last: int = 0, node: Node | None = None
    ) -> Tensor:
        """Returns a tensor that exists before and after the run, and is not on the tape."""
        tensor = Tensor(Storage(-1, unit, width * item, name, "outside"), unit, width, last or width, item)
        tensor.storage.references += 1
        if node is not None:
            self._set_node(tensor, node)
        return tensor

    def like(self, tensor: Tensor, name: str, *, item: int = 0, unit: str = "") -> Tensor:
        """Returns a freshly allocated tensor with the shape and memory order of another, `item` and `unit` apart."""
        made = self.new(unit or tensor.unit, tensor.width, item or tensor.item, name, last=tensor.last)
        made.transposed, made.head_major = tensor.transposed, tensor.head_major
        return made

    def view(self, tensor: Tensor) -> Tensor:
        """Returns another tensor on the same storage, with the same gradient."""
        made = Tensor(tensor.storage, tensor.unit, tensor.width, tensor.last, tensor.item)
        made.transposed, made.head_major, made.is_view = tensor.transposed, tensor.head_major, True
        made.slot = tensor.slot
        tensor.storage.references += 1
        self._set_node(made, tensor.node)
        return made

    def keep(self, tensor: Tensor) -> Tensor:
        """Returns `tensor`, held once more."""
        tensor.references += 1
        return tensor

    def release(self, *values: Any) -> None:
        """Gives up one hold on each tensor; anything else is left alone."""
        for value in values:
            if isinstance(value, Tensor):
                value.references -= 1
                if not value.references:
                    self._release_storage(value.storage)
                    self._set_node(value, None)
            elif isinstance(value, tuple):
                self.release(*value)

    def buffers(self, *sizes: tuple[Any, int], name: str) -> None:
        """Allocates what a kernel needs for itself, and frees it."""
        made = [self.new(unit, size, 1, name, account=WORKSPACE) for unit, size in sizes if size]
        self.release(*made)

    def _release_storage(self, storage: Storage) -> None:
        storage.references -= 1
        if not storage.references:
            self.tape.append(~storage.index)
            if storage.more is not None:
                self._release_storage(storage.more)

    def _set_node(self, tensor: Tensor, node: Node | None) -> None:
        before, tensor.node = tensor.node, node
        if node is not None:
            node.references += 1
        if before is not None:
            self._drop(before)

    def _drop(self, node: Node) -> None:
        node.references -= 1
        if node.references:
            return
        self._forget(node)
        for edge in node.edges:
            if edge is not None:
                self._drop(edge[0])

    def _forget(self, node: Node) -> None:
        for storage in node.saved:
            self._release_storage(storage)
        node.saved = []

    def leaf(self, tensor: Tensor | None, run: Backward, *, sequence: int = LAST) -> Node:
        """Returns a node that ends backward: `run` is given the gradient. `tensor`, when given, is its output."""
        node = Node(sequence, [], run)
        node.references = 1
        if tensor is not None:
            self._set_node(tensor, node)
        return node

    def track(
        self, inputs: Sequence[Tensor | Node | None], saved: Sequence[Tensor | None], run: Backward
    ) -> Node | None:
        """Returns the node of an operation, with what it keeps; None when no input needs a gradient.

        To be called before the outputs are allocated; what is kept of them is added with `save`.
        """
        if not self.grad:
            return None
        edges: list[tuple[Node, int] | None] = []
        for given in inputs:
            if isinstance(given, Tensor):
                edges.append(None if given.node is None else (given.node, given.slot))
            else:
                edges.append(None if given is None else (given, 0))
        if not any(edges):
            return None
        self._sequence += 1
        node = Node(self._sequence, edges, run)
        for edge in edges:
            if edge is not None:
                edge[0].references += 1
        self.save(node, *saved)
        return node

    def save(self, node: Node | None, *tensors: Tensor | None) -> None:
        """Keeps tensors for a node's backward."""
        if node is None:
            return
        for tensor in tensors:
            self.last_save = len(self.tape)
            node.packed = True
            if tensor is not None and self.saving:
                tensor.storage.references += 1
                node.saved.append(tensor.storage)
                if self._kept is not None:
                    self._kept.append(tensor.storage)

    def produce(self, node: Node | None, *outputs: Tensor) -> None:
        """Makes tensors the outputs of a node."""
        for slot, tensor in enumerate(outputs):
            tensor.slot = slot
            self._set_node(tensor, node)

    # -- running functions -------------------------------------------------------------------------------------------

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Returns what a function or an operation gives, held once. The arguments stay the caller's."""
        function = self.functions.get(name)
        if function is None:
            operation = self.operations.get(name)
            if operation is None:
                raise ProgramError(f"no function or operation is called {name!r}")
            return operation(self, *arguments)
        if len(arguments) != len(function.parameters):
            raise ProgramError(f"{name} takes {len(function.parameters)} arguments, not {len(arguments)}")
        frame: dict[str, Any] = {}
        for parameter, value in zip(function.parameters, arguments, strict=True):
            frame[parameter] = self._hold(value)
        result = self._run(function.body, frame)
        self.release(*frame.values())
        return None if result is None else result[0]

    def _hold(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value.references += 1
        return value

    def _run(self, body: tuple[Statement, ...], frame: dict[str, Any]) -> tuple[Any] | None:
        """Runs statements; returns what a `return` gave in a tuple of one, None when there was none."""
        for statement in body:
            kind = statement.kind
            if kind == "if":
                assert statement.value is not None
                chosen = statement.body if self._evaluate(statement.value, frame) else statement.otherwise
                result = self._run(chosen, frame)
                if result is not None:
                    return result
            elif kind == "each":
                assert statement.value is not None
                self._run_each(statement.body, self._evaluate(statement.value, frame), frame)
            elif kind == "del":
                self.release(*(frame.pop(name) for name in statement.targets))
            else:
                assert statement.value is not None
                value = self._evaluate(statement.value, frame)
                if kind == "return":
                    return (value,)
                self._assign(statement.targets, value, frame)
        return None

    def _run_each(self, body: tuple[Statement, ...], size: int, frame: dict[str, Any]) -> None:
        """Runs statements for the first piece of a sequence, the next and the last.

        What the nodes of the one in the middle keep is there once more for every piece that is not run. Forward is at
        its largest in the last piece, and backward in the two that it begins with, so nothing else is left out.
        """
        first, runs = len(self.storages), min(self.names["pieces"], _PIECES)
        for _ in range(runs - 1):
            self._kept = []
            self._run(body, frame)
        at, kept, self._kept = len(self.tape), self._kept or [], None
        self._run(body, frame)
        if self.names["pieces"] <= _PIECES:
            return
        for storage in kept:
            if storage.index < first or storage.more is not None:
                continue
            unit = f"{storage.unit}*T/{size}-{_PIECES}"
            storage.more = Storage(len(self.storages), unit, storage.size, storage.name, storage.account)
            self.storages.append(storage.more)
            self.tape.insert(at, storage.more.index)
            self.last_save += 1 if self.last_save > at else 0

    def _assign(self, targets: tuple[str, ...], value: Any, frame: dict[str, Any]) -> None:
        if not targets:
            self.release(value)
            return
        values = value if len(targets) > 1 and isinstance(value, tuple) else (value,)
        if len(values) != len(targets):
            raise ProgramError(f"{', '.join(targets)} are given {len(values)} values")
        for target, one in zip(targets, values, strict=True):
            before = frame.get(target)
            frame[target] = one
            self.release(before)

    def _evaluate(self, expression: Expression, frame: dict[str, Any]) -> Any:
        """Returns the value of an expression, held once."""
        kind, text = expression.kind, expression.text
        if kind == "name":
            if text in frame:
                return self._hold(frame[text])
            if text in self.names:
                return self._hold(self.names[text])
            raise ProgramError(f"nothing is called {text!r}; known: {', '.join(sorted(map(str, self.names)))}")
        if kind == "number":
            return expression.number
        if text in ("and", "or"):
            left = self._evaluate(expression.arguments[0], frame)
            return left if bool(left) is (text == "or") else self._evaluate(expression.arguments[1], frame)
        values = [self._evaluate(argument, frame) for argument in expression.arguments]
        if text == "tuple":
            return tuple(values)
        if text == "not":
            return not values[0]
        result = self._arithmetic(text, values) if text in _ARITHMETIC else self.call(text, values)
        self.release(*values)
        return result

    def _arithmetic(self, text: str, values: list[Any]) -> Any:
        if not any(isinstance(value, Tensor) for value in values):
            return _ARITHMETIC[text](*values)
        return self.call({"+": "add", "*": "multiply", "-": "add", "/": "divide"}[text], values)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(self, root: Node, gradient: Tensor) -> None:
        """Runs backward from one node whose output's gradient is given (and given up).

        Source: torch/csrc/autograd/engine.cpp (the ready node created last runs first; what a node kept is released
            when it has run), input_buffer.cpp (gradients of one tensor are added in place when nobody else holds the
            first).
        """
        self._count(root)
        root.received[0] = gradient
        ready: list[tuple[int, int, Node]] = [(-root.sequence, 0, root)]
        order = 0
        while ready:
            ready.sort(key=lambda item: item[:2])
            node = ready.pop(0)[2]
            if node.packed and self.first_use is None:
                self.first_use = len(self.tape)
            received = [node.received.get(slot) for slot in range(max(node.received, default=-1) + 1)]
            self._running = node
            results = node.run(self, received) if received else [None] * len(node.edges)
            node.received = {}
            self.release(*received)
            self._forget(node)
            for edge, result in zip(node.edges, results, strict=True):
                if edge is None:
                    continue
                target, slot = edge
                if result is not None:
                    self._add(target, slot, result)
                target.waiting -= 1
                if not target.waiting:
                    order += 1
                    ready.append((-target.sequence, order, target))

    def give_up_saved(self) -> None:
        """Gives up what the running node kept, once its formula has been computed.

        What checkpointing has made again is held by the formula alone: it is gone before the engine sums or casts the
        results. What was kept since the forward stays until after that.
        Source: torch/utils/checkpoint.py (unpack_hook pops what it returns), torch/csrc/autograd/engine.cpp
            (validate_outputs, then release_variables).
        """
        if self.frees_early and self._running is not None:
            self._forget(self._running)

    def _count(self, root: Node) -> None:
        seen, stack = {id(root): True}, [root]
        while stack:
            for edge in stack.pop().edges:
                if edge is not None:
                    edge[0].waiting += 1
                    if id(edge[0]) not in seen:
                        seen[id(edge[0])] = True
                        stack.append(edge[0])

    def _add(self, target: Node, slot: int, gradient: Tensor) -> None:
        older = target.received.get(slot)
        if older is None:
            target.received[slot] = gradient
            return
        if older.references == 1 and older.storage.references == 1 and not older.is_view:
            self.release(gradient)
            return
        total = self.like(older, "sum of gradients")
        total.is_view = False
        self.release(older, gradient)
        target.received[slot] = total


_ARITHMETIC: dict[str, Callable[[int, int], Any]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right,
    "<": lambda left, right: left < right,
    ">": lambda left, right: left > right,
}
