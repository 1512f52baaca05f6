"""What a layer computes, as the clock sees it: matrix products, attention, and the bytes and kernels between them."""

from __future__ import annotations

from dataclasses import dataclass

from memc.clock.workload import Compute, Kernels
from memc.facts.records import AttentionFacts, Block, Component, Norm, NormKind
from memc.units import ceil_div

_COMPOSED_ACTIVATIONS = frozenset(("gelu_new", "gelu_fast", "gelu_pytorch_tanh_python", "quick_gelu"))


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of the forward pass.

    Attributes:
        inner, outer: Width it sums over, and width of its result.
        rows_per_token: Rows that one token gives it: 1, or the experts that a token is sent to.
        groups: Weight matrices that share the rows: 1, or the experts.
        adapted: Whether a LoRA pair stands beside it.
        quantized: Whether its weight may be 4-bit.
    """

    inner: int
    outer: int
    rows_per_token: int = 1
    groups: int = 1
    adapted: bool = False
    quantized: bool = True

    @property
    def weights(self) -> int:
        """Elements of its weights."""
        return self.inner * self.outer * self.groups


@dataclass(frozen=True, slots=True)
class Between:
    """Work between the matrix products of one layer and one pass.

    Attributes:
        bytes_per_token: Bytes that kernels read and write.
        kernels: Kernels.
    """

    bytes_per_token: float
    kernels: int


def products_of(block: Block, hidden_size: int, compute: Compute) -> tuple[Product, ...]:
    """Returns the matrix products of one layer, as one rank of a tensor-parallel group computes them."""
    share = compute.tensor_parallel
    found = []
    for linear in block.linears:
        inner, outer = linear.in_features, linear.out_features
        if share > 1 and outer > 1:
            outer, inner = (outer // share, inner) if inner == hidden_size else (outer, inner // share)
        found.append(
            Product(
                inner=max(1, inner),
                outer=max(1, outer),
                adapted=linear.name in compute.adapted and linear.adaptable,
                quantized=linear.quantized,
            )
        )
    mlp = block.mlp
    if mlp.experts and any(tensor.component is Component.EXPERTS for tensor in block.tensors):
        width = max(1, mlp.intermediate // share)
        up = 2 * width if mlp.gated else width
        for inner, outer in ((hidden_size, up), (width, hidden_size)):
            found.append(Product(inner, outer, rows_per_token=mlp.experts_per_token, groups=mlp.experts))
    return tuple(found)


def between(block: Block, hidden_size: int, compute: Compute) -> tuple[Between, Between]:
    """Returns what forward and backward of one layer do between the matrix products.

    Every operation reads its inputs and writes its result; its backward reads the gradient and what was kept and writes
    one gradient per input. A fused kernel touches its inputs and its result once.

    Source: transformers 5.24.0 modelling code (operations in order), torch 2.13.0 derivatives; accesses counted by
        hand. Masks, biases and per-row statistics are left out.
    """
    share, stream = compute.tensor_parallel, compute.stream_bytes
    eager = compute.kernels is Kernels.EAGER
    size = 4 if compute.dtype in ("fp32", "tf32") else 2
    forward = backward = 0.0
    kernels = 0
    for norm in block.norms:
        there, back, count = _norm(norm, stream, size, eager=eager)
        forward, backward, kernels = forward + there, backward + back, kernels + count
    width = hidden_size * stream
    adds = 2 if compute.kernels is not Kernels.COMPILED else 1
    forward, backward, kernels = forward + adds * 3 * width, backward + adds * 3 * width, kernels + adds
    attention = block.attention
    if attention.rotary and not attention.linear:
        turned = (attention.query_width + attention.key_width) * size / share
        forward += turned * (8 if eager else 2)
        backward += turned * (8 if eager else 2)
        kernels += 10 if eager else 1
    if eager and attention.key_width < attention.query_width and not attention.linear:
        # keys and values are repeated for every query head, and the gradients summed back
        repeated = 2 * (attention.key_width + attention.query_width) * size / share
        forward, backward, kernels = forward + repeated, backward + repeated, kernels + 2
    if eager and attention.linear:
        there, count = _piecewise(block, compute.length, size, share)
        forward, backward, kernels = forward + there, backward + 2 * there, kernels + count
    there, back, count = _activation(block, size, share, eager=eager)
    forward, backward, kernels = forward + there, backward + back, kernels + count
    there, back, count = _casts(block, hidden_size, size, compute)
    forward, backward, kernels = forward + there, backward + back, kernels + count
    layout = 4 if eager else 0
    launched = kernels + layout + len(block.linears)
    if compute.rank:
        launched += sum(
            _ADAPTER_KERNELS for linear in block.linears if linear.name in compute.adapted and linear.adaptable
        )
    if compute.quantized:
        launched += sum(_DEQUANTIZING_KERNELS for linear in block.linears if linear.quantized)
    if block.mlp.experts:
        apart = eager and compute.experts_apart
        launched += block.mlp.experts * _EXPERT_KERNELS if apart else _GROUPED_KERNELS if eager else _EXPERT_KERNELS
    # Backward: a product has two products behind it, an operation with two inputs two gradients.
    return Between(forward, launched), Between(backward, 2 * launched)


def _piecewise(block: Block, length: int, size: int, share: int) -> tuple[float, int]:
    """Returns the bytes per token, and the kernels of one sample, between the products of a gated delta rule.

    Source: transformers 5.24.0 modeling_qwen3_next.py torch_chunk_gated_delta_rule; accesses counted by hand: fp32
        tensors as wide as the keys and values of all value heads, the pairs of a piece, and for each piece the state.
    """
    attention, piece = block.attention, dict(block.sizes)["piece_size"]
    values = attention.value_head_dim or attention.head_dim
    keys = attention.heads * attention.head_dim * (23 * 4 + 33 * size)
    rest = attention.heads * (values * (12 * 4 + 17 * size) + piece * (9 * 4 + 7 * size))
    states = attention.heads * attention.head_dim * values * (6 * 4 + 6 * size) / piece
    return (keys + rest + states) / share, _KERNELS_AROUND_PIECES + _KERNELS_OF_PIECE * ceil_div(length, piece)


_KERNELS_AROUND_PIECES = 60  # casts, norms, padding, decays, systems and their solution, counted in the trace
_KERNELS_OF_PIECE = 17  # eight casts, four products, five elementwise
_ADAPTER_KERNELS = 6  # cast, dropout, two products, scale, add
_DEQUANTIZING_KERNELS = 4  # statistics unpacked, their offset added, a buffer made, the weight written
_EXPERT_KERNELS = 8  # select, gather, two products, activation, gate, scale, scatter
# Sort, places, two gathers, cast, count, offsets, two grouped products, activation, gate, scale, unsort (3), sum:
# transformers 5.24.0 integrations/moe.py, grouped_mm_experts_forward.
_GROUPED_KERNELS = 16


def _norm(norm: Norm, stream: int, size: int, *, eager: bool) -> tuple[float, float, int]:
    """Returns bytes per token of a norm's forward and backward, and kernels.

    An RMS norm of the modelling code is a chain in fp32: cast, square, mean, scale, cast back, weight.
    """
    if norm.kind is NormKind.NONE:
        return 0.0, 0.0, 0
    width = norm.width
    if norm.kind is NormKind.LAYER or not eager:
        return width * (stream + size), width * (2 * stream + size), 1
    casts = 2 * (stream + 4) if stream < 4 else 0
    chain = casts + (4 + 4) + 4 + (4 + 4) + 2 * stream
    extra = 3 * 4 if norm.kind is NormKind.RMS_GATED else 0
    return width * (chain + extra), 2 * width * (chain + extra), 6 if casts else 4


def _activation(block: Block, size: int, share: int, *, eager: bool) -> tuple[float, float, int]:
    """Returns bytes per token of the activation between the feed-forward products, both passes, and kernels."""
    mlp = block.mlp
    elements = mlp.intermediate * (mlp.experts_per_token if mlp.experts else 1) + mlp.shared_intermediate
    width = elements * size / share
    if mlp.gated:  # act: 2, times: 3; back: two gradients of the product, 3 each, and the activation's, 3
        return (width * 5, width * 9, 2) if eager else (width * 3, width * 5, 1)
    if eager and mlp.activation in _COMPOSED_ACTIVATIONS:  # eight operations, one or two inputs each
        return width * 20, width * 24, 8
    return width * 2, width * 3, 1


def _casts(block: Block, hidden_size: int, size: int, compute: Compute) -> tuple[float, float, int]:
    """Returns bytes per token of casts of inputs, adapters' outputs included, both passes, and kernels."""
    forward = backward = 0.0
    kernels = 0
    if compute.stream_bytes > size:  # the input of attention and of the feed-forward part, and what both return
        widths = 4 * hidden_size
        forward += widths * (compute.stream_bytes + size)
        backward += widths * (compute.stream_bytes + size)
        kernels += 4
    if compute.dtype == "fp8":  # each input and each output gradient is read, its range found, and written in 8 bits
        passed = sum(linear.in_features + linear.out_features for linear in block.linears) / compute.tensor_parallel
        reads = 1 if compute.kernels is Kernels.COMPILED else 2
        forward += passed / 2 * (size * reads + 1)
        backward += passed / 2 * (size * reads + 1)
        kernels += 4 * len(block.linears)
    if compute.rank:
        eager = compute.kernels is Kernels.EAGER
        for linear in block.linears:
            if linear.name not in compute.adapted or not linear.adaptable:
                continue
            # the input is cast to the adapter's type, and autocast casts it back for the product
            cast = 2 * (size + compute.adapter_bytes) if compute.adapter_bytes > size else 0
            drop = 2 * compute.adapter_bytes if compute.dropout else 0
            out = size * (5 if eager else 2)  # scaled: 2, added: 3
            forward += linear.in_features * (cast + drop + size) + linear.out_features * (out + size)
            # the adapter's input gradient is added to the layer's: 3; its output gradient is read twice and scaled: 4
            backward += linear.in_features * (cast + drop + 3 * size) + linear.out_features * 4 * size
    return forward, backward, kernels


def keys_per_query(attention: AttentionFacts, context: int, *, skips: bool, block_keys: int) -> float:
    """Returns the mean number of keys that a query is compared with.

    Args:
        attention: Its attention.
        context: Tokens of the whole sequence.
        skips: Whether the kernel leaves out what the mask hides; one that does works in blocks, and half a block of
            each query's last one is masked.
        block_keys: Keys in such a block.
    """
    if attention.linear:  # a chunk of 64 within, and the state, head_dim wide, twice
        return 64.0 + 2 * attention.head_dim
    window = attention.sliding_window
    context = context if attention.within is None else min(context, attention.within)
    if not skips:
        return float(context)
    if not attention.causal:
        return float(context if window is None else min(context, window))
    if window is None or window >= context:
        return context / 2 + block_keys / 2
    return window * (1 - window / (2 * context)) + block_keys / 2
