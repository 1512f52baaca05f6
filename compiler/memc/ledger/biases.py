"""Operations of what a layer or a model is given beside its input: shared biases, rows of small tables, labels."""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import operation, unary


@operation
def masked_bias(machine: Machine, bias: Tensor) -> Tensor:
    """Returns a bias where a position may look, and the lowest number elsewhere; keeps the condition for backward.

    Source: transformers 5.24.0 integrations/sdpa_attention.py create_position_bias_mask; derivatives.yaml where.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.new(bias.unit, width, item, "gradient of masked bias")]

    width, item = bias.width, bias.item
    condition = machine.new(bias.unit, 1, 1, "which positions may be seen")
    node = machine.track([bias], [condition], backward)
    out = machine.new(bias.unit, width, item, "masked bias")
    machine.produce(node, out)
    machine.release(condition)
    return out


@operation
def biases_of_samples(machine: Machine, bias: Tensor, learns: int) -> Tensor:
    """Returns a bias where a sample's padding mask allows it, and the lowest number elsewhere, for every sample.

    Args:
        machine: The machine.
        bias: The bias, the same for all samples.
        learns: Whether a gradient is computed for it though nothing needs one.

    Source: transformers 5.24.0 integrations/sdpa_attention.py create_position_bias_mask; derivatives.yaml where.
    """
    unit, width, item = bias.unit, bias.width, bias.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        of_each = machine.new(f"B*{unit}", width, item, "gradient of masked biases")
        summed = machine.new(("several", unit), width, item, "gradient of bias, summed over samples")
        machine.release(of_each)
        return [summed]

    ends = machine.leaf(None, lambda machine, gradients: []) if learns and machine.grad else None
    node = machine.track([bias if bias.node is not None else ends], [], backward)
    out = machine.new(f"B*{unit}", width, item, "masked biases")
    machine.produce(node, out)
    return out


@operation
def copied_bias(machine: Machine, bias: Tensor) -> Tensor:
    """Returns a bias in the order of its dimensions: a copy. Source: torch Tensor.contiguous."""
    return unary(machine, bias, "bias by heads", passes=True)


@operation
def for_all_samples(machine: Machine, bias: Tensor, learns: int) -> Tensor:
    """Returns a bias expanded to every sample without a copy; its gradient comes for each and is summed.

    Args:
        machine: The machine.
        bias: The bias of one sample.
        learns: Whether a gradient is computed for it though nothing needs one.

    Source: aten/src/ATen/native/transformers/attention.cpp; derivatives.yaml expand.
    """
    unit, width, item = bias.unit, bias.width, bias.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(("several", unit), width, item, "gradient of bias, summed over samples")]

    ends = machine.leaf(None, lambda machine, gradients: []) if learns and machine.grad else None
    node = machine.track([bias if bias.node is not None else ends], [], backward)
    out = machine.view(bias)
    out.unit = f"B*{unit}"
    machine.produce(node, out)
    return out


@operation
def rows_like(machine: Machine, x: Tensor) -> Tensor:
    """Returns the rows of a small embedding table for every position. Source: derivatives.yaml embedding."""
    return machine.like(x, "embedded rows")


@operation
def position_rows(machine: Machine, x: Tensor) -> Tensor:
    """Returns the rows of a table of positions, one for each, the same for all samples."""
    return machine.new(x.unit.removeprefix("B*"), x.width, x.item, "positions", last=x.last)


@operation
def given_labels(machine: Machine) -> Tensor:
    """Returns the labels of the batch, as they are."""
    return machine.outside("B*T", 1, 8, "labels")


@operation
def kept_below(machine: Machine, x: Tensor, trained: int, passed: int) -> Tensor:
    """Returns `x`, which was made by operations that keep so many elements per position for their backward.

    Args:
        machine: The machine.
        x: What they made.
        trained: Elements that they keep when their weights train.
        passed: Elements that they keep when only what lies below needs a gradient.
    """
    count = trained if machine.names["trains"] else passed

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.keep(gradient)]

    node = machine.track([x], [], backward)
    rest = machine.new(x.unit, count, machine.names["compute"], "what made the input keeps")
    machine.save(node, rest)
    out = machine.view(x)
    machine.produce(node, out)
    machine.release(rest)
    return out
