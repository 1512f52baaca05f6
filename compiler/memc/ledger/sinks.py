"""Operations of attention with a learned sink: one more column of scores, and scores less their largest."""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import OPERATIONS, cast, fitted, operation, widest

_INDEX = 8


@operation
def softmax_in_type(machine: Machine, x: Tensor) -> Tensor:
    """Returns softmax(x) in the type of x, which the caller names, so that autocast leaves it alone.

    Source: aten/src/ATen/autocast_mode.h, fp32_set_opt_dtype.
    """
    autocast, machine.names["autocast"] = machine.names["autocast"], False
    out = OPERATIONS["softmax"](machine, x)
    machine.names["autocast"] = autocast
    assert isinstance(out, Tensor)
    return out


def _columns(unit: str, *, more: bool) -> str:
    """Returns a unit of scores with one more column, or without it."""
    rows, _, columns = unit.rpartition("*")
    return f"{rows}*{columns}+1" if more else f"{rows}*{columns.removesuffix('+1')}"


@operation
def append_column(machine: Machine, scores: Tensor, sinks: Tensor) -> Tensor:
    """Returns scores with a column of one number per head, in the wider type; backward takes views of the gradient.

    Source: derivatives.yaml cat; aten/src/ATen/autocast_mode.h (cat promotes to the widest type).
    """
    item = max(scores.item, sinks.item)
    given = cast(machine, scores, item)
    shapes = [(given.unit, given.width, given.item), (sinks.unit, sinks.width, sinks.item)]
    edges = [given.node is not None, sinks.node is not None]
    rows = given.unit.rpartition("*")[0]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        results: list[Tensor | None] = [None, None]
        if edges[0]:
            view = machine.view(gradient)
            view.unit = shapes[0][0]
            results[0] = view
        if edges[1]:
            column = machine.view(gradient)
            column.unit = rows
            results[1] = fitted(machine, column, *shapes[1])
        return results

    node = machine.track([given, sinks], [], backward)
    out = machine.new(_columns(given.unit, more=True), given.width, item, "scores and sinks", last=scores.last)
    out.transposed = out.head_major = True
    machine.produce(node, out)
    machine.release(given)
    return out


@operation
def largest_of_row(machine: Machine, x: Tensor) -> Tensor:
    """Returns the largest score of each row; keeps where it is, and scatters into zeros in backward.

    Source: derivatives.yaml max.dim, value_selecting_reduction_backward.
    """
    unit, full, item = x.unit, x.width, x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        made = machine.new(unit, full, item, "gradient of largest")
        made.transposed = made.head_major = True
        return [made]

    node = machine.track([x], [], backward)
    rows = unit.rpartition("*")[0]
    values = machine.new(rows, full, item, "largest of each row", last=1)
    places = machine.new(rows, full, _INDEX, "place of the largest", last=1)
    machine.save(node, places)
    machine.produce(node, values)
    machine.release(places)
    return values


@operation
def less(machine: Machine, a: Tensor, b: Tensor) -> Tensor:
    """Returns a - b in the wider type, one the same along rows of the other; the gradient of b is negated, then summed.

    Source: derivatives.yaml sub.
    """
    a_shape, b_shape = (a.unit, a.width, a.item), (b.unit, b.width, b.item)
    edges = [a.node is not None, b.node is not None]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        negated = None
        if edges[1]:
            negated = fitted(machine, machine.like(gradient, "negated gradient"), *b_shape)
        return [fitted(machine, machine.keep(gradient), *a_shape) if edges[0] else None, negated]

    node = machine.track([a, b], [], backward)
    out = machine.like(widest(a, b), "difference", item=max(a.item, b.item))
    machine.produce(node, out)
    return out


@operation
def without_column(machine: Machine, x: Tensor) -> Tensor:
    """Returns all columns but the last as a view; backward writes a full gradient around them.

    Source: derivatives.yaml slice, slice_backward.
    """
    unit, full, item = x.unit, x.width, x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        made = machine.new(unit, full, item, "gradient of slice")
        made.transposed = made.head_major = True
        return [made]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    out.unit = _columns(unit, more=False)
    machine.produce(node, out)
    return out


@operation
def clamped(machine: Machine, x: Tensor, bounds: int) -> Tensor:
    """Returns x within one or two bounds, keeping x; backward compares again.

    Source: FunctionsManual.cpp clamp_backward.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        masks = [machine.like(gradient, "within bounds", item=1) for _ in range(bounds)]
        machine.release(*masks[1:])
        out = machine.like(gradient, "gradient of clamp")
        machine.release(masks[0])
        return [out]

    node = machine.track([x], [x], backward)
    out = machine.like(x, "clamped")
    machine.produce(node, out)
    return out
