"""Operations of layers that mix a sequence piece by piece: a gated delta rule over pieces of `size` positions.

Rows are padded to whole pieces: their unit is ``B*T~size``. What there is one of for each piece has ``B*T/size``, and
what belongs to one piece alone, as in the body of ``for each size:``, has ``B``.
"""

from __future__ import annotations

from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import cast, fitted, operation
from memc.ledger.products import Weight, batched, in_compute_type


@operation
def convolved_rows(machine: Machine, weight: Weight, x: Tensor, reach: int) -> Tensor:
    """Returns each channel's rows weighted over the `reach` rows before them, as a view of `reach` - 1 rows more.

    The weight is a view of a parameter, of which autocast caches no copy. Backward writes a gradient around the rows,
    then those of input and weight.
    Source: transformers modeling_qwen3_next.py causal_conv1d_fn; aten/src/ATen/autocast_mode.cpp cached_cast;
        derivatives.yaml convolution, slice.
    """
    autocast = machine.names["autocast"]
    compute = machine.names["compute"] if autocast else weight.item
    wide = cast(machine, x, weight.item)
    copy, weight_node = in_compute_type(machine, weight)
    machine.release(machine.cache.pop(weight, None))
    given = cast(machine, wide, compute)
    channels, unit, rest = x.width, x.unit, x.unit.partition("*")[0]
    given_node = given.node

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        around = machine.new(unit, channels, compute, "gradient of rows and those beyond")
        more = machine.new(rest, channels * (reach - 1), compute, "gradient of rows beyond")
        of_x = machine.new(unit, channels, compute, f"gradient of {weight.name} input") if given_node else None
        of_weight = None
        if weight_node is not None:
            of_weight = machine.new("1", weight.elements, compute, f"{weight.name} gradient")
        machine.release(around, more)
        return [of_x, of_weight]

    node = machine.track([given, weight_node], [given, copy], backward)
    out = machine.new(unit, channels, compute, f"{weight.name} output", last=channels)
    beyond = machine.new(rest, channels * (reach - 1), compute, f"{weight.name} rows beyond")
    machine.produce(node, out)
    machine.save(node, beyond)
    machine.release(wide, given, copy, beyond)
    return out


@operation
def padded_to_pieces(machine: Machine, x: Tensor, size: int) -> Tensor:
    """Returns rows followed by zeros up to whole pieces: always a copy; backward copies the rows out of it.

    Source: aten/src/ATen/native/PadNd.cpp constant_pad_nd.
    """
    unit, width, item, last = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, "gradient of padded rows", last=last)]

    node = machine.track([x], [], backward)
    out = machine.new(f"{unit}~{size}", width, item, "padded rows", last=last)
    machine.produce(node, out)
    return out


@operation
def rows_without_padding(machine: Machine, x: Tensor) -> Tensor:
    """Returns padded rows without their padding, as a view."""
    out = machine.view(x)
    out.unit = x.unit.partition("~")[0]
    return out


@operation
def cumulated(machine: Machine, x: Tensor) -> Tensor:
    """Returns running sums; backward sums from the other end, between two flips.

    Source: FunctionsManual.cpp cumsum_backward.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        flipped, summed = (machine.like(gradient, "flipped gradient") for _ in range(2))
        machine.release(flipped)
        out = machine.like(gradient, "gradient of running sums")
        machine.release(summed)
        return [out]

    node = machine.track([x], [], backward)
    out = machine.like(x, "running sums")
    machine.produce(node, out)
    return out


@operation
def differences_in_pieces(machine: Machine, x: Tensor, size: int) -> Tensor:
    """Returns x at one position less x at another, for all pairs in a piece; the gradient is summed over each of them.

    Source: derivatives.yaml sub; engine.cpp validate_outputs (sum_to).
    """
    shape = (x.unit, x.width, x.item)

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        negated = machine.like(gradient, "negated gradient")
        first = fitted(machine, machine.keep(gradient), *shape)
        return [first, fitted(machine, negated, *shape)]

    node = machine.track([x, x], [], backward)
    out = machine.new(x.unit, x.width * size, x.item, "differences of pairs", last=size)
    machine.produce(node, out)
    return out


@operation
def hidden_above(machine: Machine, x: Tensor, size: int) -> Tensor:
    """Returns x with pairs above the diagonal filled; keeps a mask of one piece, and fills the gradient too.

    Source: derivatives.yaml masked_fill.Scalar.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.like(gradient, "gradient of filled")]

    mask = machine.new("1", size * size, 1, "mask of a piece")
    node = machine.track([x], [mask], backward)
    out = machine.like(x, "filled above the diagonal")
    machine.produce(node, out)
    machine.release(mask)
    return out


@operation
def matrix_product(machine: Machine, left: Tensor, right: Tensor, width: int, last: int) -> Tensor:
    """Returns products of matrices, one for each head and piece, `width` elements per unit of `left`.

    Source: aten/src/ATen/native/LinearAlgebra.cpp matmul: batches of matrices that a view can express.
    """
    compute = machine.names["compute"] if machine.names["autocast"] else left.item
    b = cast(machine, right, compute)
    a = cast(machine, left, compute)
    out = batched(machine, a, b, left.unit, width, last=last)
    out.transposed = out.head_major = False
    machine.release(a, b)
    return out


@operation
def solved(machine: Machine, system: Tensor, right: Tensor) -> Tensor:
    """Returns x of system @ x = right for triangular systems; keeps the system and x.

    Backward solves again, and where the system needs a gradient multiplies, negates and clears a triangle.
    Source: FunctionsManual.cpp linalg_solve_triangular_backward; aten/src/ATen/native/BatchLinearAlgebra.cpp.
    """
    edges = [system.node is not None, right.node is not None]
    unit, width, item, last = system.unit, system.width, system.item, system.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        of_right = machine.like(gradient, "gradient of the right side")
        of_system = None
        if edges[0]:
            product = machine.new(unit, width, item, "product of gradient and solution", last=last)
            negated = machine.like(product, "negated product")
            machine.release(product)
            of_system = machine.like(negated, "gradient of the system")
            machine.release(negated)
        if not edges[1]:
            machine.release(of_right)
        return [of_system, of_right if edges[1] else None]

    node = machine.track([system, right], [system], backward)
    out = machine.like(right, "solution")
    machine.save(node, out)
    machine.produce(node, out)
    return out


@operation
def ends_of_pieces(machine: Machine, x: Tensor, size: int) -> Tensor:
    """Returns x at the last position of every piece, as a view; backward writes a full gradient around them.

    Source: derivatives.yaml slice and select.
    """
    unit, width, item, last = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, "gradient of ends", last=last)]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    out.unit = unit.replace("~", "/")
    machine.produce(node, out)
    return out


@operation
def piece(machine: Machine, x: Tensor, size: int) -> Tensor:
    """Returns what belongs to one piece as a view; backward writes a gradient of all pieces around it.

    Source: derivatives.yaml select.int.
    """
    unit, width, item, last = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, "gradient of a piece", last=last)]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    out.unit, out.width = unit.rpartition("*")[0], width if "/" in unit else width * size
    machine.produce(node, out)
    return out


@operation
def zeros(machine: Machine, x: Tensor, width: int) -> Tensor:
    """Returns fp32 zeros, `width` for every sample of `x`."""
    return machine.new(x.unit.partition("*")[0], width, 4, "state", last=width)


@operation
def zeros_like(machine: Machine, x: Tensor) -> Tensor:
    """Returns zeros in the shape of `x`."""
    return machine.like(x, "zeros")


@operation
def with_piece(machine: Machine, whole: Tensor, part: Tensor) -> Tensor:
    """Returns `whole` after one piece of it was written to: nothing new.

    Backward makes a whole gradient, a copy of the piece's and zeros like it, and casts the copy to the piece's type.
    Source: torch/csrc/autograd/functions/tensor.cpp, CopySlices::apply_impl and CopyBackwards.
    """
    unit, width, item, last = whole.unit, whole.width, whole.item, whole.last
    shape = (part.unit, part.width, part.item)
    edges = [whole.node is not None, part.node is not None]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        passed = machine.new(unit, width, item, "gradient of pieces", last=last)
        taken, cleared = (machine.new(shape[0], shape[1], item, "gradient of a written piece") for _ in range(2))
        found = fitted(machine, taken, *shape) if edges[1] else None
        machine.release(cleared)
        if not edges[0]:
            machine.release(passed)
        return [passed if edges[0] else None, found]

    node = machine.track([whole, part], [], backward)
    out = machine.view(whole)
    out.is_view = whole.is_view
    machine.produce(node, out)
    return out
