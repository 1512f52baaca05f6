"""Operations of attention with scores biased inside the product, and functions that have a backward of their own."""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Storage, Tensor
from memc.ledger.operations import cast, operation


@operation
def batch_of_heads(machine: Machine, x: Tensor) -> Tensor:
    """Returns heads as one batch of matrices: a copy, unless there is one sample or the heads lie in order.

    Source: torch Tensor.reshape.
    """
    if x.contiguous or machine.names["single"]:
        return machine.keep(x)
    out: Tensor = machine.call("copy", [x])
    out.head_major = out.transposed
    return out


@operation
def biased_scores(machine: Machine, query: Tensor, key: Tensor) -> Tensor:
    """Returns a constant bias plus the scaled product of query and key transposed; keeps both.

    Backward scales each product in a second tensor. Under autocast the bias is cast.
    Source: derivatives.yaml baddbmm (maybe_multiply); aten/src/ATen/autocast_mode.h, lower_precision_fp.
    """
    compute = machine.names["compute"] if machine.names["autocast"] else query.item
    heads = query.width // query.last
    k, q = cast(machine, key, compute), cast(machine, query, compute)
    edges = [q.node is not None, k.node is not None]
    shapes = [(t.unit, t.width, t.item, t.last) for t in (q, k)]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        results: list[Tensor | None] = [None, None]
        for i in (0, 1):
            if edges[i]:
                one, size, item, last = shapes[i]
                product = machine.new(one, size, item, "gradient of product", last=last)
                made = machine.new(one, size, item, "scaled gradient of product", last=last)
                made.transposed = made.head_major = True
                machine.release(product)
                results[i] = made
        return results

    bias = None
    if compute != machine.names["stream"]:
        bias = machine.new(query.unit, heads, compute, "bias by position")
    node = machine.track([q, k], [q if edges[1] else None, k if edges[0] else None], backward)
    out = machine.new(f"{query.unit}*{key.unit.split('*')[1]}", heads, compute, "biased scores")
    out.transposed = out.head_major = True
    machine.produce(node, out)
    machine.release(q, k, bias)
    return out


@operation
def by_hand(machine: Machine, x: Tensor) -> Tensor:
    """Returns a function of x that has a backward of its own: the program's `forward_by_hand` and `backward_by_hand`.

    It keeps x. `backward_by_hand` is given the gradient and x.
    Source: torch/autograd/function.py (forward runs without gradients; save_for_backward).
    """
    storage, unit, width, last, item = x.storage, x.unit, x.width, x.last, x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        kept = _again(storage, unit, width, last, item)
        out: Tensor = machine.call("backward_by_hand", [gradient, kept])
        machine.release(kept)
        return [out]

    node = machine.track([x], [x], backward)
    recorded, machine.grad = machine.grad, False
    out: Tensor = machine.call("forward_by_hand", [x])
    machine.grad = recorded
    machine.produce(node, out)
    return out


def _again(storage: Storage, unit: str, width: int, last: int, item: int) -> Tensor:
    """Returns a tensor that was kept, without what made it."""
    storage.references += 1
    return Tensor(storage, unit, width, last, item)
