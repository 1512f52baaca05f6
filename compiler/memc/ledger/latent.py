"""Operations of attention over compressed keys and values."""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import fitted, operation, unary


@operation
def filled_by_parts(machine: Machine, left: Tensor, right: Tensor) -> Tensor:
    """Returns an empty tensor into whose two slices `left` and `right` were copied, heads first.

    Backward of each copy makes a whole gradient, and a copy of its slice.
    Source: torch/csrc/autograd/functions/tensor.cpp, CopySlices::apply_impl and CopyBackwards.
    """
    shapes = [(t.unit, t.width, t.last, t.item) for t in (left, right)]
    edges = [left.node is not None, right.node is not None]
    item = left.item
    whole, size = left.width + right.width, left.last + right.last
    unit = left.unit

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        results: list[Tensor | None] = [None, None]
        rest: Tensor | None = None
        for i in (1, 0):
            one, width, last, part_item = shapes[i]
            passed = machine.new(unit, whole, item, "gradient of slices", last=size)
            machine.release(rest)
            rest = passed
            part = machine.new(one, width, item, "gradient of slice", last=last)
            part.transposed = part.head_major = True
            results[i] = fitted(machine, part, one, width, part_item) if edges[i] else None
            if not edges[i]:
                machine.release(part)
        machine.release(rest)
        return results

    node = machine.track([left, right], [], backward)
    out = machine.new(unit, whole, item, "filled by parts", last=size)
    out.transposed = out.head_major = True
    machine.produce(node, out)
    return out


@operation
def table_like(machine: Machine, x: Tensor) -> Tensor:
    """Returns a table of positions made for one layer alone, as wide as one head of `x`."""
    return machine.new("T", x.last, machine.names["stream"], "table of positions", last=x.last)


@operation
def scale_by_table(machine: Machine, x: Tensor) -> Tensor:
    """Returns pairs of `x` as complex numbers times a table: a new tensor of the same size; only the table is kept."""
    return unary(machine, x, "rotated pairs")


@operation
def values_alone(machine: Machine, values: Tensor, whole: int) -> Tensor:
    """Returns values as a batched product takes them, when they are a part of something `whole` elements wide.

    With several samples they are copied, and the copy is kept for backward; one sample needs no copy, and keeps the
    whole instead.
    Source: aten/src/ATen/native/LinearAlgebra.cpp matmul (operands are reshaped: copied where no view can express it).
    """
    unit, width, last, item = values.unit, values.width, values.last, values.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.keep(gradient)]

    node = machine.track([values], [], backward)
    rest = machine.new(("single", unit), whole, item, "what values are a part of")
    machine.save(node, rest)
    out = machine.new(("several", unit), width, item, "values", last=last)
    out.unit = unit
    out.transposed = out.head_major = True
    machine.produce(node, out)
    machine.release(rest)
    return out
