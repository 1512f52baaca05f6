"""The operations that block programs are made of: what each allocates, keeps for backward, and does there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memc.ledger.machine import WORKSPACE, Gradients, Machine, Tensor

OPERATIONS: dict[str, Callable[..., Any]] = {}
"""Operations by the name that programs call them by."""


def operation(run: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operation under the name of its function, without a trailing underscore."""
    OPERATIONS[run.__name__.rstrip("_")] = run
    return run


def fitted(machine: Machine, gradient: Tensor, unit: Any, width: int, item: int) -> Tensor:
    """Returns a gradient in the shape and type of the tensor it belongs to, and gives up `gradient`.

    Source: torch/csrc/autograd/engine.cpp validate_outputs: sum_to for broadcast tensors, a cast for other types.
    """
    if machine.names.get("single") and gradient.unit == f"B*{unit}":
        unit = gradient.unit
    if gradient.unit != unit or gradient.width != width or gradient.item != item:
        machine.give_up_saved()
    if gradient.unit != unit or gradient.width != width:
        total = machine.new(unit, width, gradient.item, "gradient summed over broadcast dimensions")
        if unit == "1" and gradient.contiguous:
            machine.buffers((("rows", gradient.unit, gradient.width // width, width), 1), name="row sums")
        machine.release(gradient)
        gradient = total
    if gradient.item != item:
        cast = machine.like(gradient, "gradient cast", item=item)
        machine.release(gradient)
        gradient = cast
    return gradient


def unary(
    machine: Machine,
    x: Tensor,
    name: str,
    *,
    keeps_input: bool = False,
    keeps_output: bool = False,
    passes: bool = False,
) -> Tensor:
    """Returns an elementwise function of a tensor, whose backward allocates one gradient (or passes it on)."""

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.keep(gradient) if passes else machine.like(gradient, f"gradient of {name}")]

    node = machine.track([x], [x] if keeps_input else [], backward)
    out = machine.like(x, name)
    if keeps_output:
        machine.save(node, out)
    machine.produce(node, out)
    return out


@operation
def cast(machine: Machine, x: Tensor, item: int) -> Tensor:
    """Returns `x` in elements of `item` bytes; itself when it has them. Source: torch Tensor.to."""
    if x.item == item:
        return machine.keep(x)
    before = x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.like(gradient, "gradient cast back", item=before)]

    node = machine.track([x], [], backward)
    out = machine.like(x, f"{x.storage.name} as {item} B", item=item)
    machine.produce(node, out)
    return out


@operation
def item(machine: Machine, x: Tensor) -> int:
    """Returns the bytes of one element of `x`."""
    return x.item


@operation
def width(machine: Machine, x: Tensor) -> int:
    """Returns the elements of `x` per token."""
    return x.width


@operation
def last(machine: Machine, x: Tensor) -> int:
    """Returns the size of the last dimension of `x`."""
    return x.last


def widest(a: Tensor, b: Tensor) -> Tensor:
    """Returns the operand that gives a broadcast result its shape."""
    if a.unit == b.unit:
        return a if a.width >= b.width else b
    if "/" in str(a.unit) + str(b.unit):  # one element for each piece of what the other has rows of
        return b if "/" in str(a.unit) else a
    return a if len(str(a.unit)) >= len(str(b.unit)) else b


@operation
def add(machine: Machine, a: Tensor, b: Tensor) -> Tensor:
    """Returns a + b in the wider type; backward hands the same gradient to both. Source: derivatives.yaml add."""
    shapes = [(t.unit, t.width, t.item) for t in (a, b)]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [
            None if edge is None else fitted(machine, machine.keep(gradient), *shape)
            for edge, shape in zip(edges, shapes, strict=True)
        ]

    edges = [a.node, b.node]
    node = machine.track([a, b], [], backward)
    out = machine.like(widest(a, b), "sum", item=max(a.item, b.item))
    machine.produce(node, out)
    return out


@operation
def multiply(machine: Machine, a: Tensor, b: Tensor) -> Tensor:
    """Returns a * b in the wider type; each operand is kept for the other's gradient. Source: derivatives.yaml mul."""
    if isinstance(b, int) or isinstance(a, int):
        return scale(machine, a if isinstance(a, Tensor) else b)
    shapes = [(t.unit, t.width, t.item) for t in (a, b)]
    edges = [a.node is not None, b.node is not None]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        products: list[Tensor | None] = [None, None]
        for i in (1, 0):
            if edges[i]:
                products[i] = machine.like(gradient, "gradient of product", item=max(gradient.item, shapes[1 - i][2]))
        return [p and fitted(machine, p, *shape) for p, shape in zip(products, shapes, strict=True)]

    node = machine.track([a, b], [a if edges[1] else None, b if edges[0] else None], backward)
    out = machine.like(widest(a, b), "product", item=max(a.item, b.item))
    if a.unit == b.unit and a.width == b.width:
        out.transposed, out.head_major = a.transposed, a.head_major
    machine.produce(node, out)
    return out


@operation
def divide(machine: Machine, a: Tensor, b: Tensor) -> Tensor:
    """Returns a / b; keeps b, and a when b needs a gradient. Source: derivatives.yaml div."""
    if not isinstance(b, Tensor):
        return scale(machine, a)
    shapes = [(t.unit, t.width, t.item) for t in (a, b)]
    edges = [a.node is not None, b.node is not None]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        results: list[Tensor | None] = [None, None]
        if edges[1]:
            steps = [machine.like(gradient, "gradient of quotient") for _ in range(3)]
            results[1] = steps.pop()
            machine.release(*steps)
        if edges[0]:
            results[0] = machine.like(gradient, "gradient of quotient")
        return [r and fitted(machine, r, *shape) for r, shape in zip(results, shapes, strict=True)]

    node = machine.track([a, b], [a if edges[1] else None, b], backward)
    out = machine.like(widest(a, b), "quotient", item=max(a.item, b.item))
    machine.produce(node, out)
    return out


@operation
def scale(machine: Machine, x: Tensor) -> Tensor:
    """Returns x times (or divided by) a number: nothing is kept. Source: derivatives.yaml mul.Scalar."""
    return unary(machine, x, "scaled")


@operation
def shift(machine: Machine, x: Tensor) -> Tensor:
    """Returns x plus a number: nothing is kept, and the gradient is passed on. Source: derivatives.yaml add.Scalar."""
    return unary(machine, x, "shifted", passes=True)


@operation
def negate(machine: Machine, x: Tensor) -> Tensor:
    """Returns -x. Source: derivatives.yaml neg."""
    return unary(machine, x, "negated")


@operation
def silu(machine: Machine, x: Tensor) -> Tensor:
    """Returns silu(x), keeping x. Source: derivatives.yaml silu."""
    return unary(machine, x, "silu", keeps_input=True)


@operation
def gelu(machine: Machine, x: Tensor) -> Tensor:
    """Returns torch's gelu(x), exact or tanh, keeping x. Source: derivatives.yaml gelu."""
    return unary(machine, x, "gelu", keeps_input=True)


@operation
def softplus(machine: Machine, x: Tensor) -> Tensor:
    """Returns softplus(x), keeping x; in fp32 under autocast. Source: derivatives.yaml softplus."""
    return wide(machine, x, lambda y: unary(machine, y, "softplus", keeps_input=True))


@operation
def relu(machine: Machine, x: Tensor) -> Tensor:
    """Returns relu(x), keeping the result. Source: derivatives.yaml relu."""
    return unary(machine, x, "relu", keeps_output=True)


@operation
def tanh(machine: Machine, x: Tensor) -> Tensor:
    """Returns tanh(x), keeping the result. Source: derivatives.yaml tanh."""
    return unary(machine, x, "tanh", keeps_output=True)


@operation
def sigmoid(machine: Machine, x: Tensor) -> Tensor:
    """Returns sigmoid(x), keeping the result. Source: derivatives.yaml sigmoid."""
    return unary(machine, x, "sigmoid", keeps_output=True)


@operation
def exp(machine: Machine, x: Tensor) -> Tensor:
    """Returns exp(x), keeping the result; in fp32 under autocast. Source: derivatives.yaml exp."""
    return wide(machine, x, lambda y: unary(machine, y, "exponential", keeps_output=True))


@operation
def rsqrt(machine: Machine, x: Tensor) -> Tensor:
    """Returns 1 / sqrt(x), keeping the result. Source: derivatives.yaml rsqrt."""
    return unary(machine, x, "reciprocal root", keeps_output=True)


def wide(machine: Machine, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns `run` of `x` in fp32 when autocast is on. Source: torch autocast_mode.h, AT_FORALL_FP32."""
    given = cast(machine, x, 4) if machine.names["autocast"] else machine.keep(x)
    out = run(given)
    machine.release(given)
    return out


@operation
def square(machine: Machine, x: Tensor) -> Tensor:
    """Returns x ** 2, keeping x; backward computes 2 * x ** 1 * gradient. Source: FunctionsManual.cpp pow_backward."""

    def power(x: Tensor) -> Tensor:
        def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
            (gradient,) = gradients
            assert gradient is not None
            first, doubled, out = (machine.like(gradient, "gradient of square") for _ in range(3))
            machine.release(first, doubled)
            return [out]

        node = machine.track([x], [x], backward)
        out = machine.like(x, "square")
        machine.produce(node, out)
        return out

    return wide(machine, x, power)


@operation
def cube(machine: Machine, x: Tensor) -> Tensor:
    """Returns x ** 3, keeping x; backward is that of `square`. Source: FunctionsManual.cpp pow_backward."""
    found: Tensor = square(machine, x)
    return found


@operation
def mean(machine: Machine, x: Tensor) -> Tensor:
    """Returns the mean over the last dimension; backward writes the gradient out in full.

    Source: FunctionsManual.cpp mean_backward.
    """
    unit, full, item, size = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, full, item, "gradient of mean", last=size)]

    node = machine.track([x], [], backward)
    out = machine.new(unit, full // size, item, "mean", last=1)
    out.transposed, out.head_major = x.transposed, x.transposed
    machine.produce(node, out)
    return out


@operation
def total(machine: Machine, x: Tensor) -> Tensor:
    """Returns the sum over the last dimension; its gradient is expanded without a copy.

    Source: derivatives.yaml sum.
    """
    size, full = x.last, x.width

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        out = machine.view(gradient)
        out.width, out.last = full, size
        return [out]

    node = machine.track([x], [], backward)
    out = machine.new(x.unit, full // size, x.item, "total", last=1)
    out.transposed, out.head_major = x.transposed, x.transposed
    machine.produce(node, out)
    return out


@operation
def softmax(machine: Machine, x: Tensor) -> Tensor:
    """Returns softmax(x) in the type of x, keeping the result; in fp32 under autocast.

    Backward computes gradient * output before its kernel runs.
    Source: aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out.
    """

    def run(x: Tensor) -> Tensor:
        def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
            (gradient,) = gradients
            assert gradient is not None
            out = machine.like(gradient, "gradient of softmax")
            machine.buffers((gradient.unit, gradient.width * gradient.item), name="softmax product")
            return [out]

        node = machine.track([x], [], backward)
        out = machine.like(x, "probabilities")
        machine.save(node, out)
        machine.produce(node, out)
        return out

    return wide(machine, x, run)


@operation
def dropout(machine: Machine, x: Tensor) -> Tensor:
    """Returns x with dropout: a copy and a kept mask of one byte per element.

    Source: aten/src/ATen/native/cuda/Dropout.cu, native_dropout.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.like(gradient, "gradient of dropout")]

    node = machine.track([x], [], backward)
    out = machine.like(x, "dropped out")
    mask = machine.like(x, "dropout mask", item=1)
    machine.save(node, mask)
    machine.produce(node, out)
    machine.release(mask)
    return out


# -- shapes ----------------------------------------------------------------------------------------------------------


@operation
def split_heads(machine: Machine, x: Tensor, size: int) -> Tensor:
    """Returns `x` viewed as heads of `size`, tokens first; backward copies a gradient that lies by heads.

    Source: derivatives.yaml view: the gradient is reshaped, with a copy when its order does not allow a view.
    """
    before = x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [_flat(machine, gradient, before)]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    out.last = size
    machine.produce(node, out)
    return out


def _flat(machine: Machine, tensor: Tensor, last: int) -> Tensor:
    """Returns a tensor with tokens first, by a copy when its heads come first in memory."""
    if tensor.head_major:
        out = machine.like(tensor, "copy by tokens")
        out.head_major = False
    else:
        out = machine.view(tensor)
    out.transposed, out.last = False, last
    return out


@operation
def transpose(machine: Machine, x: Tensor) -> Tensor:
    """Returns `x` with its heads and tokens exchanged, as a view."""
    out = machine.view(x)
    out.transposed = not x.transposed
    return out


@operation
def heads(machine: Machine, x: Tensor, size: int) -> Tensor:
    """Returns `x` as heads of `size`, heads first: ``view(...).transpose(1, 2)``."""
    tokens_first = split_heads(machine, x, size)
    out: Tensor = transpose(machine, tokens_first)
    machine.release(tokens_first)
    return out


@operation
def merge_heads(machine: Machine, x: Tensor) -> Tensor:
    """Returns ``transpose(1, 2).contiguous()`` as one row per token: a copy when heads come first in memory."""
    size = x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        out = machine.view(gradient)
        out.transposed, out.last = True, size
        return [out]

    node = machine.track([x], [], backward)
    out = _flat(machine, x, x.width)
    machine.produce(node, out)
    return out


@operation
def reshape(machine: Machine, x: Tensor, size: int) -> Tensor:
    """Returns `x` viewed with another last dimension."""
    out = machine.view(x)
    out.last = size
    return out


@operation
def split(machine: Machine, x: Tensor, *widths: int) -> tuple[Tensor, ...]:
    """Returns views of `x` along its last dimension; backward concatenates their gradients, zeros where one is missing.

    Source: derivatives.yaml split_with_sizes (chunk is one).
    """
    whole = x.width
    share = sum(widths)

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        present = [gradient for gradient in gradients if gradient is not None]
        missing = [machine.new(unit, whole * widths[i] // share, present[0].item, "zeros") for i in absent(gradients)]
        out = machine.like(present[0], "gradient of split")
        out.storage.size, out.width, out.last = whole * present[0].item, whole, size
        out.head_major = out.transposed
        machine.release(*missing)
        return [out]

    def absent(gradients: Gradients) -> list[int]:
        return [i for i in range(len(widths)) if i >= len(gradients) or gradients[i] is None]

    unit, size = x.unit, x.last
    node = machine.track([x], [], backward)
    outputs = []
    for part in widths:
        view = machine.view(x)
        view.width, view.last = whole * part // share, x.last * part // share
        outputs.append(view)
    machine.produce(node, *outputs)
    return tuple(outputs)


@operation
def slice_(machine: Machine, x: Tensor, size: int) -> Tensor:
    """Returns `size` elements of the last dimension as a view; backward writes a full gradient around them.

    Source: derivatives.yaml slice, slice_backward.
    """
    full, before, unit, by_heads = x.width, x.last, x.unit, x.transposed

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        out = machine.new(unit, full, gradient.item, "gradient of slice", last=before)
        out.transposed, out.head_major = gradient.transposed, by_heads
        return [out]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    out.width, out.last = x.width // x.last * size, size
    machine.produce(node, out)
    return out


@operation
def concat(machine: Machine, *parts: Tensor) -> Tensor:
    """Returns tensors joined along the last dimension, a contiguous copy; backward takes views of the gradient.

    Source: derivatives.yaml cat.
    """
    shapes = [(part.width, part.last, part.item) for part in parts]
    edges = [part.node is not None for part in parts]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        results: list[Tensor | None] = []
        for wanted, (part, size, item) in zip(edges, shapes, strict=True):
            view = machine.view(gradient) if wanted else None
            if view is not None:
                view.width, view.last = part, size
                view = fitted(machine, view, view.unit, part, item)
            results.append(view)
        return results

    node = machine.track(parts, [], backward)
    whole = sum(part.width for part in parts)
    out = machine.new(parts[0].unit, whole, max(part.item for part in parts), "joined")
    out.last = sum(part.last for part in parts)
    out.transposed = out.head_major = parts[0].transposed
    machine.produce(node, out)
    return out


@operation
def contiguous(machine: Machine, x: Tensor) -> Tensor:
    """Returns `x` in the order of its dimensions: a copy unless it is. Source: torch Tensor.contiguous."""
    if x.contiguous:
        return machine.keep(x)
    out = unary(machine, x, "contiguous copy", passes=True)
    out.head_major = out.transposed
    return out


@operation
def copy(machine: Machine, x: Tensor) -> Tensor:
    """Returns a copy of `x`; its gradient is passed on. Source: derivatives.yaml clone."""
    return unary(machine, x, "copy", passes=True)


@operation
def expand(machine: Machine, x: Tensor, times: int) -> Tensor:
    """Returns `x` repeated `times` along a new dimension without a copy; backward sums over it."""
    unit, before, item, size = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        out = machine.new(unit, before, item, "gradient summed over repeats", last=size)
        out.transposed = out.head_major = gradient.transposed
        return [out]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    out.width = x.width * times
    machine.produce(node, out)
    return out


@operation
def repeated_table(machine: Machine, x: Tensor) -> Tensor:
    """Returns a rotary table with the values of its first half repeated: a copy. Source: torch repeat_interleave."""
    return machine.like(x, "repeated table")


@operation
def repeat_heads(machine: Machine, x: Tensor, times: int) -> Tensor:
    """Returns key or value heads repeated for each query head: a copy, unless `times` is 1 or there is one head.

    A dimension of one head joins the repeats without a copy; what wants its elements in order copies it then.
    Source: transformers sdpa_attention.py and modeling files, repeat_kv: expand, then reshape;
        aten/src/ATen/TensorUtils.cpp computeStride (dimensions of size 1 are left out).
    """
    if times == 1:
        return machine.keep(x)
    seen = expand(machine, x, times)
    if x.width == x.last:
        seen.head_major = not seen.transposed
        found: Tensor = seen
        return found
    out = machine.call("copy", [seen])
    out.head_major = out.transposed
    machine.release(seen)
    assert isinstance(out, Tensor)
    return out


__all__ = ["OPERATIONS", "WORKSPACE", "fitted", "operation", "unary", "wide"]
