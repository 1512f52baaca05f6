"""Operations of routed experts: choosing them, gathering their rows, products with fused three-dimensional weights.

A token's rows stand side by side: what has one row per chosen expert is as many times as wide.
"""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import cast, fitted, operation
from memc.ledger.products import Weight, weight_product

_INDEX = 8
_COUNT = 4


@operation
def plain_product(machine: Machine, weight: Weight, x: Tensor, rows: int) -> Tensor:
    """Returns x times a parameter of `rows` rows that is no linear: it carries no adapter and is never in 4 bits.

    Source: torch.nn.functional.linear.
    """
    weight.rows, weight.columns = rows, weight.elements // rows
    return weight_product(machine, weight, x)


@operation
def largest(machine: Machine, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest elements of each row, and where they are; keeps the places.

    Backward scatters into zeros. Source: derivatives.yaml topk, FunctionsManual.cpp value_selecting_reduction_backward.
    """
    unit, full, item, size = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, full, item, "gradient of largest", last=size)]

    node = machine.track([x], [], backward)
    values = machine.new(unit, full // size * count, item, "largest", last=count)
    places = machine.new(unit, full // size * count, _INDEX, "places", last=count)
    machine.save(node, places)
    machine.produce(node, values)
    return values, places


@operation
def divide_in_place(machine: Machine, x: Tensor, y: Tensor) -> Tensor:
    """Returns x after ``x /= y``: no new tensor, but a copy of what x was, which the gradient of y needs.

    Source: derivatives.yaml div.Tensor; torch/csrc/autograd codegen keeps a clone of an operand that is overwritten.
    """
    edges = [x.node is not None, y.node is not None]
    y_shape = (y.unit, y.width, y.item, y.last)

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        results: list[Tensor | None] = [None, None]
        if edges[0]:
            results[0] = machine.like(gradient, "gradient of quotient")
        if edges[1]:
            steps = [machine.like(gradient, "gradient of divisor") for _ in range(4)]
            unit, width, item, last = y_shape
            results[1] = machine.new(unit, width, item, "gradient of divisor", last=last)
            machine.release(*steps)
        return results

    before = machine.like(x, "copy before division") if edges[1] and machine.grad else None
    node = machine.track([x, y], [y, before], backward)
    out = machine.view(x)
    machine.produce(node, out)
    machine.release(before)
    return out


@operation
def sorted_places(machine: Machine, places: Tensor) -> tuple[Tensor, Tensor]:
    """Returns places in the order of their experts, and where each came from. Source: torch.sort."""
    return (
        machine.new(places.unit, places.width, _INDEX, "places by expert", last=1),
        machine.new(places.unit, places.width, _INDEX, "order by expert", last=1),
    )


@operation
def places_like(machine: Machine, places: Tensor) -> Tensor:
    """Returns another tensor of places: ``order // k``, ``empty_like``, ``arange``."""
    return machine.new(places.unit, places.width, _INDEX, "places", last=1)


@operation
def counts_like(machine: Machine, places: Tensor) -> Tensor:
    """Returns places as 32-bit integers, as torch.histc takes them."""
    return machine.new(places.unit, places.width, _COUNT, "places as int32", last=1)


@operation
def per_expert(machine: Machine, count: int) -> Tensor:
    """Returns one 32-bit integer per expert: how many rows each has, or where they end."""
    return machine.new("1", count, _COUNT, "rows per expert")


@operation
def gather(machine: Machine, x: Tensor, places: Tensor, width: int) -> Tensor:
    """Returns the rows of `x`, each `width` wide, that `places` names; keeps the places.

    Backward adds into zeros. Source: derivatives.yaml index.Tensor, FunctionsManual.cpp index_backward.
    """
    unit, full, item, size = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, full, item, "gradient of gathered rows", last=size)]

    node = machine.track([x], [places], backward)
    out = machine.new(places.unit, places.width * width, item, "gathered rows", last=width)
    machine.produce(node, out)
    return out


@operation
def gather_in_row(machine: Machine, x: Tensor, places: Tensor) -> Tensor:
    """Returns the elements of each row that `places` names; keeps the places, and adds into zeros in backward.

    Source: derivatives.yaml gather, gather_backward.
    """
    unit, full, item, size = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, full, item, "gradient of gathered elements", last=size)]

    node = machine.track([x], [places], backward)
    out = machine.new(places.unit, places.width, item, "gathered elements", last=places.last)
    machine.produce(node, out)
    return out


@operation
def gather_parameter(machine: Machine, weight: Weight, places: Tensor, width: int) -> Tensor:
    """Returns the rows of a parameter, each `width` wide, that `places` names; keeps the places when it trains.

    Source: derivatives.yaml index.Tensor.
    """
    weight_node = weight.node(machine)

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new("1", weight.elements, weight.item, f"{weight.name} gradient")]

    node = machine.track([weight_node], [places], backward)
    out = machine.new(places.unit, places.width * width, weight.item, f"{weight.name} rows", last=width)
    machine.produce(node, out)
    return out


@operation
def add_in_place(machine: Machine, x: Tensor, y: Tensor) -> Tensor:
    """Returns x after ``x += y``; backward hands the same gradient to both. Source: derivatives.yaml add.Tensor."""
    edges = [x.node is not None, y.node is not None]
    items = [x.item, y.item]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [cast(machine, gradient, item) if wanted else None for wanted, item in zip(edges, items, strict=True)]

    node = machine.track([x, y], [], backward)
    out = machine.view(x)
    machine.produce(node, out)
    return out


@operation
def plain_product_with_bias(machine: Machine, weight: Weight, bias: Weight, x: Tensor, rows: int) -> Tensor:
    """Returns x times a parameter of `rows` rows, plus another: torch.nn.functional.linear of a router."""
    weight.bias = bias
    bias.rows, bias.columns = bias.elements, 1
    found: Tensor = plain_product(machine, weight, x, rows)
    return found


@operation
def grouped_product(machine: Machine, weight: Weight, x: Tensor, offsets: Tensor, inside: int, outside: int) -> Tensor:
    """Returns rows of `inside` elements times the matrices of their experts, `outside` elements each.

    The product is not one that autocast knows: x is cast to the type of the weight. It keeps x when the weight trains,
    and the offsets; backward computes the gradient of the weight, then that of x.
    Source: transformers 5.24.0 integrations/moe.py _grouped_mm; derivatives.yaml _grouped_mm.
    """
    given = cast(machine, x, weight.item)
    weight_node = weight.node(machine)
    given_node = given.node
    unit, full, item = given.unit, given.width, given.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        of_x = of_weight = None
        if weight_node is not None:
            of_weight = machine.new("1", weight.elements, item, f"{weight.name} gradient")
        if given_node is not None:
            of_x = machine.new(unit, full, item, f"gradient of {weight.name} input", last=inside)
        return [of_x, of_weight]

    node = machine.track([given, weight_node], [given if weight_node is not None else None, offsets], backward)
    out = machine.new(unit, full // inside * outside, item, f"{weight.name} output", last=outside)
    machine.produce(node, out)
    machine.release(given)
    return out


@operation
def sum_of_rows(machine: Machine, x: Tensor, width: int) -> Tensor:
    """Returns the sum of a token's rows, each `width` wide, in fp32 under autocast.

    Its gradient is expanded without a copy, unless it is cast.
    Source: derivatives.yaml sum.dim_IntList; aten/src/ATen/autocast_mode.h, fp32_set_opt_dtype.
    """
    unit, full, size, item = x.unit, x.width, x.last, x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        expanded = machine.view(gradient)
        expanded.width, expanded.last = full, size
        return [expanded if gradient.item == item else fitted(machine, expanded, unit, full, item)]

    node = machine.track([x], [], backward)
    out = machine.new(unit, width, 4 if machine.names["autocast"] else item, "sum of rows", last=width)
    machine.produce(node, out)
    return out


@operation
def rows_of(machine: Machine, x: Tensor) -> Tensor:
    """Returns `x` as one row per chosen expert again; its gradient, when it is expanded, is copied.

    Source: derivatives.yaml view: the gradient is reshaped, which copies what no view can express.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.like(gradient, "gradient of rows") if gradient.is_view else machine.keep(gradient)]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    machine.produce(node, out)
    return out
