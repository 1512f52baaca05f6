"""Operations with weights and matrix products: linears, 4-bit linears, norm weights, attention scores."""

from __future__ import annotations

from typing import Any

from memc.ledger.attention_kernels import nested_constants
from memc.ledger.machine import CASTS, GRADIENTS, WORKSPACE, Gradients, Machine, Node, Tensor
from memc.ledger.operations import cast, fitted, operation
from memc.units import ceil_div


class Weight:
    """A parameter of a block, or a linear with all that hangs on it.

    Attributes:
        name: Name of its module.
        unit: ``1``, or ``r`` for the elements of an adapter per rank.
        rows: Output features (per unit).
        columns: Input features (per unit).
        item: Bytes of one element.
        trained: Whether it has a gradient.
        quantized: Whether it is kept in 4 bits.
        bias: Its bias; None without one.
        down, up: Its adapter; None without one.
        leaf: The node that takes its gradient.
    """

    __slots__ = ("bias", "columns", "down", "item", "leaf", "name", "quantized", "rows", "trained", "unit", "up")

    def __init__(self, name: str, rows: int, columns: int, item: int, *, trained: bool, unit: str = "1") -> None:
        self.name, self.unit, self.rows, self.columns, self.item = name, unit, rows, columns, item
        self.trained, self.quantized = trained, False
        self.bias: Weight | None = None
        self.down: Weight | None = None
        self.up: Weight | None = None
        self.leaf: Node | None = None

    @property
    def elements(self) -> int:
        """Elements per unit."""
        return self.rows * self.columns

    def node(self, machine: Machine) -> Node | None:
        """Returns the node that takes the gradient; None when the weight does not train."""
        if not self.trained or not machine.grad:
            return None
        if self.leaf is None:
            self.leaf = machine.leaf(None, _accumulate)
        return self.leaf


def _accumulate(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
    """Takes a weight's gradient: it stays, or (when gradients already have a place) is added there and freed."""
    (gradient,) = gradients
    if gradient is not None and machine.names["gradients_stay"]:
        gradient.storage.account = GRADIENTS
        gradient.storage.references += 1
    return []


def in_compute_type(machine: Machine, weight: Weight) -> tuple[Tensor | None, Node | None]:
    """Returns the copy of a weight that autocast makes (None when it makes none), and the node for its gradient.

    A copy of a trained fp32 weight is made once and cached until autocast exits.
    Source: aten/src/ATen/autocast_mode.cpp cached_cast.
    """
    node = weight.node(machine)
    compute = machine.names["compute"]
    if not machine.names["autocast"] or weight.item == compute:
        return None, node
    if weight in machine.cache:
        copy = machine.cache[weight]
        return machine.keep(copy), copy.node
    item, unit, size = weight.item, weight.unit, weight.elements

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, size, item, f"{weight.name} weight gradient")]

    made = machine.track([node], [], backward)
    copy = machine.new(unit, size, compute, f"{weight.name} weight as {compute} B", account=CASTS)
    machine.produce(made, copy)
    if weight.trained:
        machine.cache[weight] = machine.keep(copy)
    return copy, copy.node


def empty_cache(machine: Machine) -> None:
    """Gives up autocast's copies, as at the end of its region."""
    machine.release(*machine.cache.values())
    machine.cache = {}


AUTOCAST_LEFT = "length of the tape when autocast ended"


@operation
def leave_autocast(machine: Machine) -> int:
    """Returns 0; ends the region of autocast, with the weight copies that nothing else holds.

    Source: accelerate utils/operations.py ConvertOutputsToFp32: what a model returns is cast outside of autocast.
    """
    empty_cache(machine)
    machine.names[AUTOCAST_LEFT] = len(machine.tape)
    return 0


def _product_unit(x: Tensor, weight: Weight) -> tuple[Any, int]:
    """Returns unit and width of x times a weight whose rows or columns may be the rank."""
    if weight.unit == "1":
        return x.unit, weight.rows * (x.width // weight.columns)
    if str(x.unit).endswith("*r"):
        return x.unit[: -len("*r")], weight.rows * x.width
    return f"{x.unit}*r", x.width // weight.columns


def weight_product(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns x times a weight, plus its bias: torch's linear on rows of tokens.

    Keeps x when the weight trains, and the weight('s copy) when x needs a gradient. Backward computes the weight's
    gradient before that of x without a bias, and after it with one.
    Source: derivatives.yaml mm and addmm; aten/src/ATen/native/Linear.cpp; autocast casts arguments from the last.
    """
    compute = machine.names["compute"] if machine.names["autocast"] else max(x.item, 0)
    bias_node = None
    bias_copy = None
    if weight.bias is not None:
        bias_copy, bias_node = in_compute_type(machine, weight.bias)
    copy, weight_node = in_compute_type(machine, weight)
    given = cast(machine, x, compute)
    unit, size = _product_unit(x, weight)
    shape = (x.unit, x.width, x.last)

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        of_x = of_weight = of_bias = None

        def input_gradient() -> Tensor | None:
            if given_node is None:
                return None
            made = machine.new(shape[0], shape[1], compute, f"gradient of {weight.name} input", last=shape[2])
            made.is_view = True
            return made

        if weight.bias is not None:
            of_x = input_gradient()
        if weight_node is not None:
            of_weight = machine.new(weight.unit, weight.elements, compute, f"{weight.name} weight gradient")
        if weight.bias is None:
            of_x = input_gradient()
        if bias_node is not None and weight.bias is not None:
            of_bias = fitted(machine, machine.keep(gradient), "1", weight.bias.rows, compute)
        return [of_x, of_weight, of_bias]

    given_node = given.node
    node = machine.track([given, weight_node, bias_node], [], backward)
    if node is not None:
        machine.save(node, given if weight_node is not None else None)
        if given_node is not None:
            machine.save(node, copy)
    out = machine.new(unit, size, compute, f"{weight.name} output")
    machine.produce(node, out)
    machine.release(given, copy, bias_copy)
    return out


@operation
def base_linear(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns a linear without its adapter."""
    return _packed_product(machine, weight, x) if weight.quantized else weight_product(machine, weight, x)


def _packed_product(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns x times a 4-bit weight, in the type of x.

    The weight is dequantised in forward and in backward.
    Assumes: more tokens than bitsandbytes' own kernel for products in forward takes, which reads the weight as it is:
        256 on any card, 64 on an H100 (1536 and 512 where the weight has less than 4 Mi elements).
    Source: bitsandbytes/backends/cuda/ops.py _gemm_4bit_use_custom_cuda and _dequant_linear_fallback,
        autograd/_functions.py MatMul4Bit.backward; bitsandbytes/nn/modules.py Linear4bit.forward.
    """
    compute = machine.names["compute"]
    shape = (x.unit, x.width, x.last)
    nested = nested_constants(weight.elements) if machine.names["double_quantization"] else 0
    given = cast(machine, x, compute)

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        constants = machine.new("1", nested, 1, "quantisation constants", account=WORKSPACE)
        dense = machine.new("1", weight.elements, compute, f"{weight.name} dequantised", account=WORKSPACE)
        machine.release(constants)
        out = machine.new(shape[0], shape[1], compute, f"gradient of {weight.name} input", last=shape[2])
        out.is_view = True
        machine.release(dense)
        return [out]

    node = machine.track([given], [], backward)
    out = machine.new(x.unit, weight.rows * (x.width // weight.columns), compute, f"{weight.name} output")
    machine.produce(node, out)
    machine.buffers(("1", nested), ("1", nested), ("1", compute * weight.elements), name=f"{weight.name} dequantised")
    machine.release(given)
    widened = cast(machine, out, x.item)
    machine.release(out)
    found: Tensor = widened
    return found


@operation
def adapter_down(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns lora_A of a linear applied to x."""
    assert weight.down is not None
    return weight_product(machine, weight.down, x)


@operation
def adapter_up(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns lora_B of a linear applied to x."""
    assert weight.up is not None
    return weight_product(machine, weight.up, x)


@operation
def adapted(machine: Machine, weight: Weight) -> bool:
    """Returns whether a linear carries an adapter."""
    return weight.down is not None


@operation
def quantized(machine: Machine, weight: Weight) -> bool:
    """Returns whether a linear is kept in 4 bits."""
    return weight.quantized


@operation
def trained(machine: Machine, weight: Weight) -> bool:
    """Returns whether a weight has a gradient."""
    return weight.trained


@operation
def out_features(machine: Machine, weight: Weight) -> int:
    """Returns the width of a linear's output."""
    return weight.rows


@operation
def weight_of(machine: Machine, weight: Weight) -> Tensor:
    """Returns a parameter itself, as an operand of elementwise operations."""
    return machine.outside("1", weight.elements, weight.item, weight.name, node=weight.node(machine))


@operation
def layer_norm(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns torch's LayerNorm of x, in fp32 under autocast; keeps its input and two fp32 statistics per row.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu; derivatives.yaml native_layer_norm; autocast's fp32 list.
    """
    item = 4 if machine.names["autocast"] else x.item
    node_of_weight = weight.node(machine)
    given = cast(machine, x, item)
    x_node, rows = given.node, x.width // x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        of_x = machine.like(gradient, f"gradient of {weight.name}") if x_node is not None else None
        of_weight = None
        if node_of_weight is not None:
            of_weight = machine.new("1", weight.elements, weight.item, f"{weight.name} weight gradient")
        return [of_x, of_weight]

    node = machine.track([given, node_of_weight], [given], backward)
    out = machine.like(given, f"{weight.name} output")
    statistics = machine.new(x.unit, 2 * rows, 4, "mean and rstd")
    machine.save(node, statistics)
    machine.produce(node, out)
    machine.release(given, statistics)
    return out


def _for_product(machine: Machine, x: Tensor) -> Tensor:
    """Returns `x` as bmm takes it: cast under autocast, and copied when its order allows no view.

    Heads of several samples that lie by tokens are no single batch of matrices; those of one sample are.
    """
    compute = machine.names["compute"] if machine.names["autocast"] else x.item
    given = cast(machine, x, compute)
    out = _in_order(machine, given)
    machine.release(given)
    return out


def _in_order(machine: Machine, x: Tensor) -> Tensor:
    """Returns heads as one batch of matrices, in the type that they have."""
    if x.contiguous or machine.names["single"]:
        return machine.keep(x)
    out = machine.call("copy", [x])
    out.head_major = out.transposed
    assert isinstance(out, Tensor)
    return out


@operation
def scores(machine: Machine, query: Tensor, key: Tensor) -> Tensor:
    """Returns query times key transposed: one number per pair of tokens and head.

    Source: aten/src/ATen/native/LinearAlgebra.cpp matmul (batched operands are reshaped, with copies when they are not
    contiguous); derivatives.yaml bmm.
    """
    k = _for_product(machine, key)
    q = _for_product(machine, query)
    unit = f"{query.unit}*{key.unit.split('*')[1]}"
    out = batched(machine, q, k, unit, query.width // query.last, last=0)
    machine.release(q, k)
    return out


@operation
def weighted(machine: Machine, weights: Tensor, value: Tensor) -> Tensor:
    """Returns attention weights times values, heads first. Source: as `scores`."""
    v = _for_product(machine, value)
    w = _for_product(machine, weights)
    unit = weights.unit.rsplit("*", 1)[0]
    out = batched(machine, w, v, unit, weights.width * value.last, last=value.last)
    machine.release(w, v)
    return out


def batched(machine: Machine, left: Tensor, right: Tensor, unit: str, width: int, *, last: int) -> Tensor:
    """Returns products of batches of matrices, heads first; each operand is kept for the other's gradient."""
    edges = [left.node is not None, right.node is not None]
    shapes = [(t.unit, t.width, t.item, t.last) for t in (left, right)]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        given = machine.keep(gradient) if gradient.contiguous else _in_order(machine, gradient)
        results: list[Tensor | None] = [None, None]
        for i in (1, 0):
            if edges[i]:
                one, size, item, last_of = shapes[i]
                made = machine.new(one, size, item, "gradient of product", last=last_of)
                made.transposed = made.head_major = made.is_view = True
                results[i] = made
        machine.release(given)
        return results

    node = machine.track([left, right], [left if edges[1] else None, right if edges[0] else None], backward)
    out = machine.new(unit, width, left.item, "product", last=last)
    out.transposed = out.head_major = True
    machine.produce(node, out)
    return out


@operation
def groups_of(machine: Machine, query: Tensor, key: Tensor) -> int:
    """Returns how many query heads share one key head."""
    return ceil_div(query.width * key.last, query.last * key.width)
