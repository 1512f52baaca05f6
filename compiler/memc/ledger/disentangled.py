"""Operations of attention whose scores depend on distances too: products with a table, one number for each pair."""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import cast, operation
from memc.ledger.products import batched

_INDEX = 8


@operation
def for_each_sample(machine: Machine, x: Tensor) -> Tensor:
    """Returns the heads of a table repeated for every sample: a copy. Backward sums over samples.

    Source: torch Tensor.repeat; FunctionsManual.cpp repeat_backward.
    """
    unit, width, item, last = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        out = machine.new(unit, width, item, "gradient of a table, summed over samples", last=last)
        out.transposed = out.head_major = True
        return [out]

    node = machine.track([x], [], backward)
    out = machine.new("B", width, item, "table for each sample", last=last)
    out.transposed = out.head_major = True
    machine.produce(node, out)
    return out


@operation
def table_product(machine: Machine, x: Tensor, table: Tensor) -> Tensor:
    """Returns heads times the rows of a table: one number for each head, position and row. Source: torch.bmm."""
    rows = table.width // x.width
    item = machine.names["compute"] if machine.names["autocast"] else x.item
    left, right = cast(machine, x, item), cast(machine, table, item)
    out = batched(machine, left, right, x.unit, x.width // x.last * rows, last=rows)
    machine.release(left, right)
    return out


@operation
def row_of_distances(machine: Machine, backwards: int) -> Tensor:
    """Returns which row of a table belongs to every pair of positions: sums that are kept between its ends.

    Args:
        machine: The machine.
        backwards: Whether distances are counted the other way round.

    Source: transformers 5.24.0 models/deberta_v2/modeling_deberta_v2.py disentangled_attention_bias.
    """
    pairs = "T*T"
    before = machine.new(pairs, 1, _INDEX, "distances") if backwards else None
    shifted = machine.new(pairs, 1, _INDEX, "distances from the table's middle")
    machine.release(before)
    rows = machine.new(pairs, 1, _INDEX, "rows of the table")
    machine.release(shifted)
    return rows


@operation
def at_distances(machine: Machine, x: Tensor, rows: Tensor, turned: int) -> Tensor:
    """Returns of the products with a table the one of each pair; keeps the rows, and what they were taken from.

    Backward writes into zeros. Source: derivatives.yaml gather, FunctionsManual.cpp gather_backward.

    Args:
        machine: The machine.
        x: The products.
        rows: The row of each pair.
        turned: Whether queries and keys are exchanged, as a view.
    """
    unit, width, item, last, heads = x.unit, x.width, x.item, x.last, x.width // x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        out = machine.new(unit, width, item, "gradient of products with a table", last=last)
        out.transposed = out.head_major = True
        return [out]

    node = machine.track([x], [rows, x], backward)
    out = machine.new(f"{unit}*T", heads, item, "scores of distances", last=0)
    out.transposed = out.head_major = True
    machine.produce(node, out)
    if not turned:
        return out
    view = machine.view(out)
    machine.release(out)
    return view


@operation
def hidden_from_padding(machine: Machine, x: Tensor) -> Tensor:
    """Returns scores with the lowest number where padding is looked at; keeps where that is.

    Source: derivatives.yaml masked_fill.
    """
    pairs = x.unit

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.like(gradient, "gradient of masked scores")]

    places = machine.new(pairs, 1, 1, "places of padding")
    node = machine.track([x], [places], backward)
    out = machine.like(x, "masked scores")
    machine.produce(node, out)
    machine.release(places)
    return out


@operation
def boolean_mask(machine: Machine) -> Tensor:
    """Returns the model's mask as booleans. Source: torch Tensor.bool."""
    return machine.new("B*T*T", 1, 1, "mask as booleans")


@operation
def mask_of_rows(machine: Machine, x: Tensor) -> Tensor:
    """Returns the padding mask in the type of `x`, one number per token."""
    return machine.new(x.unit, 1, x.item, "mask of rows")
