"""Kernels and modelling code of other programs, as operations and functions of the ledger's block programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from memc.facts import ModelFacts
from memc.facts.records import Block, BlockGroup, Component, Linear
from memc.ledger.constants import Stack
from memc.ledger.machine import Gradients, Machine, Node, Tensor
from memc.ledger.operations import cast, operation, softmax
from memc.ledger.products import Weight, base_linear

_FUNCTION = re.compile(r"^def (\w+)\(.*?(?=^def |\Z)", re.MULTILINE | re.DOTALL)
_FUSED_NORM = "def rms_norm(m, x):\n    return fused_rms_norm(m, x)\n"
_FUSED_ROTARY = "def rotate(x):\n    return rotate_in_place(x)\n"
_FUSED_ADAPTERS = (
    "def linear(m, x):\n    if adapted(m):\n        return fused_adapter(m, x)\n    return base_linear(m, x)\n"
)
_SOFTMAX = re.compile(r"(?<!\w)softmax\(")
_SWIGLU = re.compile(r"\b(?:silu|activate)\(linear\(gate_proj, x\)\) \* linear\(up_proj, x\)")
_FUSED_SWIGLU = "fused_swiglu(linear(gate_proj, x), linear(up_proj, x))"


def with_kernels(model: ModelFacts, stack: Stack) -> ModelFacts:
    """Returns the model with the operations that a stack's fused kernels replace."""
    functions = {
        "rms_norm": _FUSED_NORM if stack.fused_norm else "",
        "rotate": _FUSED_ROTARY if stack.fused_rotary else "",
        "linear": _FUSED_ADAPTERS if stack.fused_adapters else "",
    }
    functions = {name: text for name, text in functions.items() if text}

    def change(block: Block) -> Block:
        text = replaced(block.forward, functions)
        return replace(block, forward=_SWIGLU.sub(_FUSED_SWIGLU, text) if stack.fused_swiglu else text)

    return _with_blocks(model, change)


def with_older_softmax(model: ModelFacts) -> ModelFacts:
    """Returns the model with softmax as torch had it before ``torch.softmax_keeps_result_alone_since``."""
    return _with_blocks(
        model, lambda block: replace(block, forward=_SOFTMAX.sub("softmax_keeping_input(", block.forward))
    )


def replaced(program: str, functions: Mapping[str, str]) -> str:
    """Returns a program with the text of those of its functions that `functions` names."""
    return _FUNCTION.sub(lambda found: functions.get(found.group(1), found.group(0)), program)


def _with_blocks(model: ModelFacts, change: Callable[[Block], Block]) -> ModelFacts:
    """Returns the model with the layers of its main stack changed; equal layers stay the same object."""
    changed: dict[int, Block] = {}
    groups = []
    for group in model.groups:
        block = changed.setdefault(id(group.block), change(group.block))
        groups.append(BlockGroup(block=block, count=group.count))
    return replace(model, groups=tuple(groups))


@operation
def softmax_keeping_input(machine: Machine, x: Tensor) -> Tensor:
    """Returns softmax(x), keeping what it read beside the result: its backward asked for a tensor to tell the type.

    Source: torch 1.10.2, schema _softmax_backward_data(Tensor grad_output, Tensor output, int dim, Tensor self).
    """
    read = cast(machine, x, 4) if machine.names["autocast"] and x.item != 4 else x
    out: Tensor = softmax(machine, read)
    machine.save(out.node, read)
    return out


@operation
def fused_rms_norm(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns a normalised tensor; keeps the input and one statistic per row, and backward writes over the gradient.

    Source: Unsloth and Liger-Kernel rms_norm: save_for_backward(X, W, RSTD); dX in place of dY.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        of_weight = None
        if weight_node is not None:
            of_weight = machine.new("1", weight.elements, weight.item, f"{weight.name} weight gradient")
        return [machine.keep(gradient), of_weight]

    weight_node = weight.node(machine)
    node = machine.track([x, weight_node], [x], backward)
    out = machine.like(x, f"{weight.name} output")
    statistic = machine.new(x.unit, 1, 4, "reciprocal root mean square")
    machine.save(node, statistic)
    machine.produce(node, out)
    machine.release(statistic)
    return out


@operation
def fused_swiglu(machine: Machine, gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up; keeps both, and backward writes their gradients over them.

    Source: Liger-Kernel ops/swiglu.py, LigerSiLUMulFunction.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.view(gate), machine.view(up)]

    node = machine.track([gate, up], [gate, up], backward)
    out = machine.like(gate, "product")
    machine.produce(node, out)
    return out


@operation
def rotate_in_place(machine: Machine, x: Tensor) -> Tensor:
    """Returns `x` rotated where it lies. Source: Unsloth rope_embedding.py, Liger-Kernel ops/rope.py."""

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [machine.keep(gradient)]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    machine.produce(node, out)
    return out


@operation
def fused_adapter(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns a linear with its adapter in one autograd function: it keeps its input and what dropout leaves of it.

    Source: fms-acceleration fused_ops/unsloth_lora/bnb/fast_lora.py LoRA_QKV, LoRA_W: save_for_backward(X, A, B,
        dropped X); the gradient of X is written over X, products with the adapter pass through one temporary.
    """
    result = base_linear(machine, weight, x)

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        machine.buffers((x_unit, x_bytes), name="adapter's share of the input gradient")
        return [None, machine.keep(gradient), *_adapter_gradients(machine, (weight,))]

    x_unit, x_bytes = x.unit, x.width * x.item
    dropped = machine.like(x, f"{weight.name} dropped input") if machine.names["dropped"] else machine.keep(x)
    node = machine.track([x, result, *_adapter_nodes(machine, (weight,))], [x, dropped], backward)
    out = machine.view(result)
    machine.produce(node, out)
    machine.release(result, dropped)
    return out


def _adapter_nodes(machine: Machine, weights: tuple[Weight, ...]) -> list[Node | None]:
    """Returns the nodes that take the gradients of adapters."""
    return [part.node(machine) for part in _adapter_parts(weights)]


def _adapter_gradients(machine: Machine, weights: tuple[Weight, ...]) -> list[Tensor | None]:
    """Returns fresh gradients of adapters, in the order of their nodes."""
    return [
        machine.new(part.unit, part.elements, part.item, f"{part.name} gradient") for part in _adapter_parts(weights)
    ]


def _adapter_parts(weights: tuple[Weight, ...]) -> list[Weight]:
    return [part for weight in weights for part in (weight.down, weight.up) if part is not None]


# -- LitGPT ------------------------------------------------------------------------------------------------------------

_LITGPT = """
def litgpt_rms(m, x):
    variance = mean(x * x)
    x = x * rsqrt(shift(variance))
    return weight_of(m) * x

def turned(x):
    return concat(rotate(x))

def rotate(x):
    return x * cosine + rotate_half(x) * sine

def rotate_half(x):
    x1 = slice(x, last(x) / 2)
    x2 = slice(x, last(x) / 2)
    return concat(negate(x2), x1)

def attention(x):
    qkv = litgpt_qkv(q_proj, k_proj, v_proj, x)
    q, k, v = litgpt_heads(qkv, q_proj, k_proj, v_proj, head_dim)
    q = turned(q)
    k = turned(k)
    y = merge_heads(flash_kernel(q, k, v))
    return litgpt_linear(o_proj, y)
"""
_LITGPT_SEQUENTIAL = """
def block(x):
    n = norm(input_layernorm, x)
    h = attention(n)
    x = x + h
    x = x + mlp(norm(post_attention_layernorm, x))
    return x
"""
_LITGPT_PARALLEL = """
def block(x):
    n = norm(input_layernorm, x)
    h = attention(n)
    m = norm(post_attention_layernorm, x)
    x = x + h + mlp(m)
    return x
"""
_LITGPT_SHARED = """
def block(x):
    n = norm(input_layernorm, x)
    h = attention(n)
    x = x + h + mlp(n)
    return x
"""
_LITGPT_GATED = """
def mlp(x):
    gate = litgpt_linear(gate_proj, x)
    up = litgpt_linear(up_proj, x)
    x = silu(gate) * up
    return litgpt_linear(down_proj, x)
"""
_LITGPT_PLAIN = """
def mlp(x):
    x = litgpt_linear(up_proj, x)
    x = gelu(x)
    return litgpt_linear(down_proj, x)
"""


def as_litgpt(model: ModelFacts) -> ModelFacts:
    """Returns the model as LitGPT builds it: query, key and value in one product, its own norms, rotary and adapters.

    Source: github.com/Lightning-AI/litgpt@8641822 lit_gpt/model.py, lit_gpt/lora.py, lit_gpt/rmsnorm.py.
    """
    return _with_blocks(model, lambda block: _litgpt_block(model, block))


def with_prefixes(model: ModelFacts) -> ModelFacts:
    """Returns a LitGPT model whose layers, but for the lowest ones, attend to a learned prefix as well.

    Source: github.com/Lightning-AI/litgpt@8641822 lit_gpt/adapter.py: CausalSelfAttention, adapter_start_layer.
    """
    groups: list[BlockGroup] = []
    below = _FIRST_PREFIX_LAYER
    for group in model.groups:
        plain = min(below, group.count)
        prefixed = replace(group.block, forward=group.block.forward.replace(_ATTENDED, _ATTENDED_WITH_PREFIX))
        groups += [BlockGroup(block=group.block, count=plain)] if plain else []
        groups += [BlockGroup(block=prefixed, count=group.count - plain)] if group.count > plain else []
        below -= plain
    return replace(model, groups=tuple(groups))


_FIRST_PREFIX_LAYER = 2
_ATTENDED = "    y = merge_heads(flash_kernel(q, k, v))\n"
_ATTENDED_WITH_PREFIX = (
    "    y = flash_kernel(q, k, v)\n    y = y + gated_prefix(prefix_attention(q))\n    y = merge_heads(y)\n"
)


@operation
def prefix_attention(machine: Machine, query: Tensor) -> Tensor:
    """Returns attention of the query to a few learned positions: keeps query, output and a statistic for each row.

    Source: lit_gpt/adapter.py scaled_dot_product_attention with a mask, so torch's memory-efficient kernel.
    """

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        made = machine.new(unit, width, item, "gradient of attention input", last=last)
        made.transposed = True
        return [made if wanted else None, None]

    unit, width, item, last = query.unit, query.width, query.item, query.last
    wanted = query.node is not None
    node = machine.track([query, _prefix(machine)], [query], backward)
    out = machine.like(query, "attention to the prefix")
    statistic = machine.new(unit, width // last, 4, "log-sum-exp of the prefix")
    machine.save(node, out, statistic)
    machine.produce(node, out)
    machine.release(statistic)
    return out


@operation
def gated_prefix(machine: Machine, x: Tensor) -> Tensor:
    """Returns x times a learned gate of each head, keeping x; backward makes its product with x as well."""

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        out = machine.like(gradient, "gradient of attention to the prefix")
        machine.release(machine.like(gradient, "gradient of the gate before it is summed"))
        return [out, None]

    node = machine.track([x, _prefix(machine)], [x], backward)
    out = machine.like(x, "gated attention to the prefix")
    machine.produce(node, out)
    return out


def _prefix(machine: Machine) -> Node:
    """Returns the node of a learned prefix or gate, whose own bytes are too few to count."""
    return machine.leaf(None, lambda machine, gradients: [])


def _litgpt_block(model: ModelFacts, block: Block) -> Block:
    hidden, attention, mlp = model.hidden_size, block.attention, block.mlp
    query, key = attention.query_width, attention.key_width
    bias = any(linear.bias for linear in block.linears)
    own, inner = Component.ATTENTION, Component.MLP
    linears = [
        _linear("q_proj", own, hidden, query, bias),
        _linear("k_proj", own, hidden, key, bias),
        _linear("v_proj", own, hidden, key, bias),
        _linear("o_proj", own, query, hidden, bias),
    ]
    if mlp.gated:
        linears.append(_linear("gate_proj", inner, hidden, mlp.intermediate, bias))
    linears += [
        _linear("up_proj", inner, hidden, mlp.intermediate, bias),
        _linear("down_proj", inner, mlp.intermediate, hidden, bias),
    ]
    names = ("input_layernorm", "post_attention_layernorm")
    norms = tuple(replace(norm, name=name) for norm, name in zip(block.norms, names, strict=False))
    layer = model.final_norm.kind == "layer"
    shape = _LITGPT_SEQUENTIAL if not layer else _LITGPT_PARALLEL if len(norms) > 1 else _LITGPT_SHARED
    text = (shape + _LITGPT + (_LITGPT_GATED if mlp.gated else _LITGPT_PLAIN)).replace(
        "norm(", "layer_norm(" if layer else "litgpt_rms("
    )
    sizes = {"hidden": hidden, "head_dim": attention.head_dim}
    return replace(block, linears=tuple(linears), norms=norms, forward=text, sizes=tuple(sorted(sizes.items())))


def _linear(name: str, component: Component, inside: int, outside: int, bias: bool) -> Linear:
    reads = {"o_proj": "attention_output", "down_proj": "mlp_product"}.get(name, "attention_input")
    return Linear(name=name, component=component, in_features=inside, out_features=outside, bias=bias, reads=reads)


@operation
def litgpt_linear(machine: Machine, weight: Weight, x: Tensor) -> Tensor:
    """Returns a frozen linear; one in 4 bits keeps its input, as bitsandbytes did.

    Source: bitsandbytes 0.41.1 autograd/_functions.py MatMul4Bit: ctx.tensors = (A, B); None in place of A from 0.43.
    """
    out: Tensor = base_linear(machine, weight, x)
    if weight.quantized:
        machine.save(out.node, x)
    return out


@operation
def litgpt_qkv(machine: Machine, query: Weight, key: Weight, value: Weight, x: Tensor) -> Tensor:
    """Returns query, key and value from one product, plus the adapters of some of them padded with zeros.

    Keeps what dropout leaves and its mask, and the adapters' output, whose shape index_copy's backward asks for.
    Source: lit_gpt/lora.py LoRAQKVLinear.forward, zero_pad; derivatives.yaml index_copy.
    """
    parts = (query, key, value)
    rows = sum(weight.rows for weight in parts)
    item = x.item
    pretrained = _one_product(machine, parts, rows, x)
    adapted = sum(weight.rows for weight in parts if weight.down is not None)
    if not adapted:
        return pretrained
    shape, x_node = (x.unit, x.width, item, x.last), x.node

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        scaled = machine.like(gradient, "scaled gradient")
        picked = machine.new(gradient.unit, adapted, item, "gradient of adapters' output")
        machine.release(scaled)
        dropped = machine.new(*shape[:3], "gradient of dropped input", last=shape[3])
        machine.release(picked)
        out = machine.new(*shape[:3], "gradient of adapter input", last=shape[3]) if x_node is not None else None
        machine.release(dropped)
        return [out, machine.keep(gradient), *_adapter_gradients(machine, parts)]

    dropped = machine.like(x, "dropped adapter input") if machine.names["dropped"] else machine.keep(x)
    mask = machine.like(x, "dropout mask", item=1) if machine.names["dropped"] else None
    after = machine.new(x.unit, adapted, item, "adapters' output")
    inputs = [x, pretrained, *_adapter_nodes(machine, parts)]
    node = machine.track(inputs, [dropped, mask, after], backward)
    padded = machine.new(x.unit, rows, item, "padded adapters' output")
    scaled = machine.new(x.unit, rows, item, "scaled adapters' output")
    machine.release(padded)
    out = machine.new(x.unit, rows, item, "query, key and value")
    machine.produce(node, out)
    machine.release(scaled, pretrained, dropped, mask, after)
    return out


def _one_product(machine: Machine, parts: tuple[Weight, ...], rows: int, x: Tensor) -> Tensor:
    """Returns x times several weights at once."""
    shape = (x.unit, x.width, x.item, x.last)
    elements = sum(weight.elements for weight in parts)
    packed = parts[0].quantized

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        if packed:
            machine.buffers(("1", x_item * elements), name="dequantised weight")
        return [machine.new(*shape[:3], "gradient of attention input", last=shape[3])]

    x_item = x.item
    node = machine.track([x], [x if packed else None], backward)
    out = machine.new(x.unit, rows, x_item, "query, key and value")
    machine.produce(node, out)
    if packed:
        machine.buffers(("1", x_item * elements), name="dequantised weight")
    return out


@operation
def litgpt_heads(
    machine: Machine, qkv: Tensor, query: Weight, key: Weight, value: Weight, size: int
) -> tuple[Tensor, ...]:
    """Returns views of a joint product, heads first; backward joins their gradients in one new tensor."""
    unit, full, item = qkv.unit, qkv.width, qkv.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, full, item, "gradient of query, key and value")]

    node = machine.track([qkv], [], backward)
    views = []
    for weight in (query, key, value):
        part = machine.view(qkv)
        part.width, part.last, part.transposed = weight.rows, size, True
        views.append(part)
    machine.produce(node, *views)
    return tuple(views)
