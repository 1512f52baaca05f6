"""Fused attention kernels: what they return, keep, and need for themselves in backward."""

from __future__ import annotations

from memc.ledger.machine import WORKSPACE, Gradients, Machine, Tensor
from memc.ledger.operations import cast, operation
from memc.units import ceil_div, round_up

_FLASH_ROW_TILE = 128
_NF4_BLOCK = 64


def nested_constants(elements: int) -> int:
    """Returns the bytes of the fp32 block constants of a 4-bit weight, which double quantisation keeps in 8 bits."""
    return 4 * ceil_div(elements, _NF4_BLOCK)


def _inputs(machine: Machine, *tensors: Tensor) -> list[Tensor]:
    """Returns query, key and value in the compute type. Source: autocast's list of lower precision operations."""
    if not machine.names["autocast"]:
        return [machine.keep(tensor) for tensor in tensors]
    return [cast(machine, tensor, machine.names["compute"]) for tensor in tensors]


@operation
def flash_kernel(machine: Machine, query: Tensor, key: Tensor, value: Tensor, chunk: str = "") -> Tensor:
    """Returns flash attention's output, in the memory order of the query; keeps q, k, v, output and log-sum-exp.

    Backward allocates softmax sums, an fp32 query gradient, and key/value gradients by query head when heads are
    grouped. They are those of one `chunk` of rows where the kernel runs once for each.
    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_fwd and mha_bwd.
    """
    q, k, v = _inputs(machine, query, key, value)
    head_dim, count = query.last, query.width // query.last
    padded = round_up(head_dim, 32 if head_dim <= 128 else 64)
    rows = f"{chunk or query.unit}~{_FLASH_ROW_TILE}"
    grouped = key.width // key.last != count
    unit, width, item = q.unit, q.width, q.item
    shapes = [(t.unit, t.width, t.last, t.head_major, t.node is not None) for t in (q, k, v)]
    key_unit = chunk or key.unit

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        made = []
        for one, size, last, head_major, _ in shapes:
            gradient = machine.new(one, size, item, "gradient of attention input", last=last)
            gradient.transposed, gradient.head_major = True, head_major
            made.append(gradient)
        expanded = item * width if grouped else 0
        machine.buffers(
            (rows, 4 * count),
            (rows, 4 * count * padded),
            (key_unit, expanded),
            (key_unit, expanded),
            name="flash attention backward",
        )
        results: list[Tensor | None] = []
        for gradient, (*_, wanted) in zip(made, shapes, strict=True):
            results.append(gradient if wanted else None)
            if not wanted:
                machine.release(gradient)
        return results

    node = machine.track([q, k, v], [q, k, v], backward)
    out = machine.new(unit, width, item, "attention output", last=head_dim)
    out.transposed, out.head_major = True, q.head_major
    statistics = machine.new(unit, count, 4, "log-sum-exp")
    machine.save(node, out, statistics)
    machine.produce(node, out)
    machine.release(q, k, v, statistics)
    return out


@operation
def efficient_kernel(
    machine: Machine, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, chunk: str = ""
) -> Tensor:
    """Returns memory-efficient attention's output, tokens first; keeps q, k, v, bias, output and log-sum-exp.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu.
    """
    q, k, v = _inputs(machine, query, key, value)
    head_dim, count = query.last, query.width // query.last
    unit, item = q.unit, q.item
    shapes = [(t.unit, t.width, t.last, t.node is not None) for t in (q, k, v)]
    tensor_bias = bias if isinstance(bias, Tensor) else None
    bias_shape = None
    if tensor_bias is not None and tensor_bias.node is not None:
        bias_shape = (tensor_bias.unit, tensor_bias.width, tensor_bias.item)

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        made = []
        for one, size, last, _ in shapes:
            gradient = machine.new(one, size, item, "gradient of attention input", last=last)
            gradient.transposed = True
            made.append(gradient)
        of_bias = None if bias_shape is None else machine.new(*bias_shape, "gradient of attention bias")
        machine.buffers(
            (chunk or unit, 4 * count),
            (chunk or unit, count * (round_up(head_dim, 32) * 4 + 4)),
            name="memory-efficient attention backward",
        )
        results: list[Tensor | None] = []
        for gradient, (*_, wanted) in zip(made, shapes, strict=True):
            results.append(gradient if wanted else None)
            if not wanted:
                machine.release(gradient)
        return [*results, of_bias]

    node = machine.track([q, k, v, tensor_bias], [q, k, v, tensor_bias], backward)
    out = machine.new(unit, value.width // value.last * value.last, item, "attention output", last=value.last)
    out.transposed = True
    statistics = machine.new(unit, count, 4, "log-sum-exp")
    machine.save(node, out, statistics)
    machine.produce(node, out)
    machine.release(q, k, v, statistics)
    return out


@operation
def mask_bias(machine: Machine) -> Tensor:
    """Returns the additive mask that the memory-efficient kernel takes, made from the model's boolean mask.

    One copy per layer; its rows are padded to a multiple of 16 keys by another copy when they are not.
    Source: aten/src/ATen/native/transformers/attention.cpp, convert_boolean_attn_mask and pad_bias.
    """
    compute = machine.names["compute"]
    unit = machine.names["mask_unit"]
    bias = machine.new(unit, 1, compute, "attention mask of the layer")
    inverted = machine.new(unit, 1, 1, "inverted mask", account=WORKSPACE)
    machine.release(inverted)
    if not machine.names["aligned"]:
        padded = machine.new(f"{unit}~16", 1, compute, "attention mask of the layer")
        machine.release(bias)
        return padded
    return bias
