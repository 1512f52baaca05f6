"""Operations of attention that no fused kernel takes: scaled_dot_product_attention by matrix products in fp32."""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import OPERATIONS, cast, expand, operation
from memc.ledger.products import Weight, weight_product


@operation
def math_attention(machine: Machine, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns attention's output by the program's `attention_in_full(q, k, v, bias)`, which autocast leaves alone.

    Source: aten/src/ATen/native/transformers/attention.cpp, scaled_dot_product_attention (a boolean mask becomes
        numbers first) and its math fallback; aten/src/ATen/autocast_mode.h, lower_precision_fp.
    """
    names = machine.names
    autocast = names["autocast"]
    given = [cast(machine, one, names["compute"]) if autocast else machine.keep(one) for one in (query, key, value)]
    bias = machine.new(names["mask_unit"], 1, given[0].item, "attention mask of the layer")
    names["autocast"] = False
    out: Tensor = machine.call("attention_in_full", [*given, bias])
    names["autocast"] = autocast
    machine.release(*given, bias)
    return out


@operation
def safe_softmax(machine: Machine, x: Tensor) -> Tensor:
    """Returns softmax(x), or 0 in rows without a number; needs a byte per score beside the result.

    Source: aten/src/ATen/native/transformers/attention.cpp, _safe_softmax; its backward is that of softmax.
    """
    out: Tensor = OPERATIONS["softmax"](machine, x)
    machine.buffers((x.unit, x.width), name="scores that are minus infinity")
    return out


@operation
def for_each_head(machine: Machine, x: Tensor, times: int) -> Tensor:
    """Returns keys or values expanded to all query heads, as a batched product takes them.

    One sample's heads need no copy. Source: aten/src/ATen/native/LinearAlgebra.cpp matmul (expand, then reshape).
    """
    seen: Tensor = expand(machine, x, times)
    if machine.names["single"]:
        return seen
    out: Tensor = machine.call("copy", [seen])
    out.head_major = out.transposed
    machine.release(seen)
    return out


@operation
def part_of_heads(machine: Machine, x: Tensor, width: int) -> Tensor:
    """Returns heads of `width` elements together, as a view; backward writes a full gradient around them.

    Source: derivatives.yaml slice, slice_backward.
    """
    return _of_heads(machine, x, machine.view(x), width)


@operation
def chosen_heads(machine: Machine, x: Tensor, width: int) -> Tensor:
    """Returns a copy of heads that are named by a list; backward adds into zeros. Source: derivatives.yaml index."""
    return _of_heads(machine, x, machine.new(x.unit, width, x.item, "chosen heads", last=x.last), width)


def _of_heads(machine: Machine, x: Tensor, out: Tensor, width: int) -> Tensor:
    unit, full, size = x.unit, x.width, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.new(unit, full, gradient.item, "gradient of heads", last=size)]

    node = machine.track([x], [], backward)
    out.width = width
    machine.produce(node, out)
    return out


@operation
def scale_in_place(machine: Machine, x: Tensor) -> Tensor:
    """Returns x after ``x /= number``: nothing is allocated or kept; backward makes one gradient.

    Source: derivatives.yaml div.Scalar.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.like(gradient, "gradient of scaled")]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    machine.produce(node, out)
    return out


@operation
def transposed_product(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns ``x @ weight.T``: a linear whose weight autocast copies anew each time, for it caches no views.

    Source: aten/src/ATen/autocast_mode.cpp cached_cast.
    """
    out = weight_product(machine, weight, x)
    machine.release(machine.cache.pop(weight, None))
    return out
