"""Operations of experts that every token passes, each token's rows scaled by its score: one row per expert."""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import cast, operation
from memc.ledger.products import Weight, in_compute_type


@operation
def repeated(machine: Machine, x: Tensor, times: int) -> Tensor:
    """Returns `times` copies of every row, side by side; backward sums them. Source: derivatives.yaml repeat."""
    unit, width, size = x.unit, x.width, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.new(unit, width, gradient.item, "gradient summed over repeats", last=size)]

    node = machine.track([x], [], backward)
    out = machine.new(unit, width * times, x.item, "repeated rows", last=size)
    machine.produce(node, out)
    return out


@operation
def put_in_rows(machine: Machine, values: Tensor, places: Tensor, width: int) -> Tensor:
    """Returns rows of `width` equal elements with `values` written to `places`, which are kept.

    Backward gathers. Source: torch.full_like, scatter_; derivatives.yaml scatter.src.
    """
    unit, count, item, size = values.unit, values.width, values.item, values.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, count, item, "gradient of placed elements", last=size)]

    node = machine.track([values], [places], backward)
    out = machine.new(unit, width, item, "placed elements", last=width)
    machine.produce(node, out)
    return out


@operation
def product_per_expert(machine: Machine, weight: Weight, x: Tensor, inside: int, outside: int) -> Tensor:
    """Returns each expert's rows, `inside` wide, times its matrix, `outside` wide: torch.bmm, which autocast knows.

    It keeps x when the weight trains and the weight('s copy) when x needs a gradient; backward computes the weight's
    gradient first. Source: derivatives.yaml bmm; aten/src/ATen/autocast_mode.h lower_precision_fp.
    """
    compute = machine.names["compute"] if machine.names["autocast"] else x.item
    copy, weight_node = in_compute_type(machine, weight)
    given = cast(machine, x, compute)
    given_node = given.node
    unit, full = given.unit, given.width

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        of_x = of_weight = None
        if weight_node is not None:
            of_weight = machine.new("1", weight.elements, compute, f"{weight.name} gradient")
        if given_node is not None:
            of_x = machine.new(unit, full, compute, f"gradient of {weight.name} input", last=inside)
        return [of_x, of_weight]

    node = machine.track([given, weight_node], [given if weight_node is not None else None], backward)
    if given_node is not None:
        machine.save(node, copy)
    out = machine.new(unit, full // inside * outside, compute, f"{weight.name} output", last=outside)
    machine.produce(node, out)
    machine.release(given, copy)
    return out


@operation
def scale_of_positions(machine: Machine) -> Tensor:
    """Returns one fp32 number per position of a sample. Source: torch.arange and elementwise functions of it."""
    return machine.new("T", 1, 4, "scale of positions", last=1)
