"""Operations of what a layer or a model is given beside its input: shared biases, rows of small tables, labels."""

from __future__ import annotations

from memc.ledger.machine import LAST, Gradients, Machine, Tensor
from memc.ledger.operations import operation
from memc.ledger.products import Weight

_INDEX_BYTES = 8
_BUCKETS_BYTES = 4 * _INDEX_BYTES + 1
"""At most, while buckets are found: distances, the two candidates, their limit, and whether the distance is small."""
_SORT_BYTES = 5 * _INDEX_BYTES
_NEW_SEGMENT_ONE_IN = 10


def shared_tensor(machine: Machine, name: str, unit: str, width: int, item: int, learns: bool, topmost: bool) -> Tensor:
    """Returns a tensor that other layers use too, and that is counted outside the layer.

    Args:
        machine: The machine.
        name: What it is.
        unit, width, item: Its size.
        learns: Whether it has a gradient. Those of the layers are added in place.
        topmost: Whether the layer's gradient is the first, which stays.
    """

    def take(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        if topmost and gradient is not None:
            machine.keep(gradient)
        return []

    return machine.outside(unit, width, item, name, node=machine.leaf(None, take) if learns else None)


def in_use(tensor: Tensor) -> bool:
    """Returns whether something holds a shared tensor besides the machine's names."""
    return tensor.storage.references > _HELD_BY_NAMES


_HELD_BY_NAMES = 2


@operation
def relative_bias(machine: Machine, bias: Tensor, weight: Weight, both_ways: int) -> Tensor:
    """Returns the bias that the lowest layer looks up for all: one number per head and pair of positions.

    Looking up finds the bucket of every distance in whole numbers; buckets are kept when the table trains. Backward
    sums up by bucket what came from all layers.

    Args:
        machine: The machine.
        bias: The bias as layers above are given it, which stands for it when the layer is not run again.
        weight: The table.
        both_ways: Whether positions on both sides have buckets of their own.

    Source: transformers 5.24.0 models/t5/modeling_t5.py T5Attention.compute_bias and _relative_position_bucket;
        aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu.
    """
    pairs, heads, item = bias.unit, bias.width, bias.item
    distances = machine.new(pairs, 1, _INDEX_BYTES, "distances of positions")
    first = machine.new(pairs, 1, _INDEX_BYTES, "buckets of distances") if both_ways else None
    machine.buffers((pairs, _BUCKETS_BYTES), name="finding buckets")
    buckets = first or machine.new(pairs, 1, _INDEX_BYTES, "buckets of distances")

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        made = machine.new("1", weight.elements, weight.item, f"{weight.name} gradient")
        machine.buffers((pairs, _SORT_BYTES), (pairs, heads * item // _NEW_SEGMENT_ONE_IN), name="sums by bucket")
        return [made]

    def taken(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        elsewhere = bias.node
        if elsewhere is not None:
            elsewhere.run(machine, gradients)
        return [machine.outside(pairs, heads, item, "gradient of position bias")]

    table = machine.track([weight.node(machine)], [buckets], backward)
    out = machine.new(pairs, heads, item, "position bias") if machine.names["checkpointed"] else machine.view(bias)
    out.transposed, out.head_major = True, False
    machine.produce(table, out)
    if table is not None:
        soon = machine.track([out], [], taken)
        assert soon is not None
        soon.sequence = LAST
        machine.produce(soon, out)
    machine.release(distances, buckets)
    return out


@operation
def zero_bias(machine: Machine, bias: Tensor) -> Tensor:
    """Returns the bias of nothing but zeros that the lowest layer makes; another when the layer is run again.

    Source: transformers 5.24.0 models/t5/modeling_t5.py T5Attention.forward.
    """
    if not machine.names["checkpointed"]:
        return machine.keep(bias)
    out = machine.new(bias.unit, bias.width, bias.item, "cross-attention bias")
    out.transposed = out.head_major = True
    machine.produce(bias.node, out)
    return out


@operation
def masked_bias(machine: Machine, bias: Tensor) -> Tensor:
    """Returns a bias where a position may look, and the lowest number elsewhere; keeps the condition for backward.

    Source: transformers 5.24.0 integrations/sdpa_attention.py create_position_bias_mask; derivatives.yaml where.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, "gradient of masked bias")]

    unit, width, item = bias.unit, bias.width, bias.item
    condition = machine.new(unit, 1, 1, "which positions may be seen")
    node = machine.track([bias], [condition], backward)
    out = machine.like(bias, "masked bias")
    machine.produce(node, out)
    machine.release(condition)
    return out


@operation
def bias_of_samples(machine: Machine, bias: Tensor) -> Tensor:
    """Returns a bias where a sample's padding mask allows it, and the lowest number elsewhere, for every sample.

    Source: transformers 5.24.0 integrations/sdpa_attention.py create_position_bias_mask; derivatives.yaml where.
    """
    unit, width, item = bias.unit, bias.width, bias.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        of_each = machine.new(f"B*{unit}", width, item, "gradient of masked biases")
        if machine.names["single"]:
            return [of_each]
        summed = machine.new(unit, width, item, "gradient of bias, summed over samples")
        machine.release(of_each)
        return [summed]

    node = machine.track([bias], [], backward)
    out = machine.like(bias, "masked biases", unit=f"B*{unit}")
    machine.produce(node, out)
    return out


@operation
def for_all_samples(machine: Machine, bias: Tensor) -> Tensor:
    """Returns a bias expanded to every sample without a copy; its gradient comes for each and is summed.

    Source: aten/src/ATen/native/transformers/attention.cpp; derivatives.yaml expand.
    """
    unit, width, item = bias.unit, bias.width, bias.item
    if unit.startswith("B*"):
        return machine.keep(bias)

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        if machine.names["single"]:
            return [machine.keep(gradient)]
        return [machine.new(unit, width, item, "gradient of bias, summed over samples")]

    node = machine.track([bias], [], backward)
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
    return machine.new(x.unit.partition("*")[2], x.width, x.item, "positions", last=x.last)


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
