"""Seconds of one micro-batch on one GPU: forward and backward, what bounds them, and what they could hide."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memc.clock.constants import ClockFacts
from memc.clock.kernels import attention_seconds, product_seconds
from memc.clock.shapes import Product, between, products_of
from memc.clock.workload import Compute, Kernels
from memc.config import patch_grid
from memc.facts.records import Block, ModelFacts, Objective, Sees, Stack
from memc.units import ceil_div


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Seconds of one micro-batch on one GPU.

    Attributes:
        forward, backward: Matrix products and attention of the passes; backward includes what is computed again.
        forward_bandwidth, backward_bandwidth: Work that memory bounds: between products, loss, dequantisation.
        forward_launch, backward_launch: Least time in which the host launches the kernels of the pass.
        layers: Layers of all stacks.
        input_bytes: Inputs of all layers, which activation offload moves to the host.
        passed_bytes: Keys and values that ranks which share a sequence pass on in one forward; 0 when none do.
    """

    forward: float
    backward: float
    forward_bandwidth: float
    backward_bandwidth: float
    forward_launch: float
    backward_launch: float
    layers: int
    input_bytes: float = 0.0
    passed_bytes: float = 0.0

    @property
    def forward_seconds(self) -> float:
        """The forward pass: the GPU's work, or launching it."""
        return max(self.forward + self.forward_bandwidth, self.forward_launch)

    @property
    def backward_seconds(self) -> float:
        """The backward pass: the GPU's work, or launching it."""
        return max(self.backward + self.backward_bandwidth, self.backward_launch)

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward_seconds + self.backward_seconds

    def shortened(self, share: float) -> float:
        """Returns seconds of both passes with sequences that are shorter by `share`; launching stays as it is."""
        forward = (self.forward + self.forward_bandwidth) * share
        backward = (self.backward + self.backward_bandwidth) * share
        return max(forward, self.forward_launch) + max(backward, self.backward_launch)

    def with_forward_of(self, other: MicroBatch) -> MicroBatch:
        """Returns the micro-batch with one more forward pass, that of `other`."""
        return replace(
            self,
            forward=self.forward + other.forward,
            forward_bandwidth=self.forward_bandwidth + other.forward_bandwidth,
            forward_launch=self.forward_launch + other.forward_launch,
        )

    @property
    def bandwidth(self) -> float:
        """Work of both passes that memory bounds."""
        return self.forward_bandwidth + self.backward_bandwidth


@dataclass(slots=True)
class _Sum:
    """Running totals of one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0
    forward_bandwidth: float = 0.0
    backward_bandwidth: float = 0.0
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0


def micro_batch(model: ModelFacts, compute: Compute, facts: ClockFacts) -> MicroBatch:
    """Returns the seconds of one micro-batch.

    Assumes: a stack sees one item per sample, or `compute.length` positions; kernels of one pass follow each other.
    Source: rates of `ClockFacts`; operations of the modelling code.
    """
    total, layers = _Sum(), 0
    for stack in model.stacks:
        layers += stack.num_layers
        seen = compute
        if stack.sees is Sees.IMAGE and model.sees is not Sees.IMAGE:
            if not compute.images:
                continue
            seen = replace(compute, samples=compute.samples * compute.images)
        positions = _positions(stack, compute)
        if positions is not None:  # of one image or recording
            seen = replace(seen, length=positions, context=positions)
        _add_stack(total, stack, seen, facts)
    _share_layers(total, compute, layers)
    _add_loss(total, model, compute, facts)
    launch = facts.launch_seconds(compiled=compute.kernels is Kernels.COMPILED)
    gathering = facts.sharded_layer_seconds * layers / compute.stages if compute.gathered else 0.0
    return MicroBatch(
        forward=total.forward,
        backward=total.backward,
        forward_bandwidth=total.forward_bandwidth,
        backward_bandwidth=total.backward_bandwidth,
        forward_launch=total.forward_kernels * launch + gathering / 3,
        backward_launch=total.backward_kernels * launch + 2 * gathering / 3,
        layers=layers,
        input_bytes=sum(stack.num_layers * stack.hidden_size for stack in model.stacks)
        * float(compute.tokens * compute.stream_bytes),
        passed_bytes=_passed_bytes(model, compute),
    )


def _positions(stack: Stack, compute: Compute) -> int | None:
    """Returns the positions of one image or recording; None for text."""
    if stack.patches is None:
        return stack.positions_per_item
    high, wide = patch_grid(compute.image_pixels, stack.patches.side, stack.patches.merge)
    return high * wide


def _share_layers(total: _Sum, compute: Compute, layers: int) -> None:
    """Leaves the layers of one stage of a pipeline; the last stage, which is the busiest, computes the loss besides."""
    if compute.stages == 1:
        return
    share = ceil_div(layers, compute.stages) / layers
    total.forward *= share
    total.backward *= share
    total.forward_bandwidth *= share
    total.backward_bandwidth *= share
    total.forward_kernels *= share
    total.backward_kernels *= share


def _passed_bytes(model: ModelFacts, compute: Compute) -> float:
    if compute.context <= compute.length:
        return 0.0
    widths = sum(2 * group.block.attention.key_width * group.count for group in model.groups)
    return 2.0 * widths * compute.samples * compute.context


def _add_stack(total: _Sum, stack: Stack, compute: Compute, facts: ClockFacts) -> None:
    for group in stack.groups:
        layer = _layer(group.block, stack.hidden_size, compute, facts)
        total.forward += layer.forward * group.count
        total.backward += layer.backward * group.count
        total.forward_bandwidth += layer.forward_bandwidth * group.count
        total.backward_bandwidth += layer.backward_bandwidth * group.count
        total.forward_kernels += layer.forward_kernels * group.count
        total.backward_kernels += layer.backward_kernels * group.count


def _layer(block: Block, hidden_size: int, compute: Compute, facts: ClockFacts) -> _Sum:
    products = products_of(block, hidden_size, compute)
    forward = backward = weights = dequantized = 0.0
    for product in products:
        there, back = _product(product, compute, facts)
        forward, backward = forward + there, backward + back
        weights += product.weights
        dequantized += product.weights if product.quantized else 0
    score, score_back = attention_seconds(block.attention, compute, facts)
    if block.cross_attention is not None:
        more, more_back = attention_seconds(block.cross_attention, compute, facts)
        score, score_back = score + more, score_back + more_back
    first, second = between(block, hidden_size, compute)
    memory, tokens = facts.memory_bytes_per_second, compute.tokens
    moved, moved_back = first.bytes_per_token * tokens / memory, second.bytes_per_token * tokens / memory
    casts = 0.0
    if compute.gathered and not compute.quantized:  # out of the buffer of the gather, into that of the reduction
        casts += 4 * weights / memory
    if compute.autocast:  # weights: 4 bytes read, 2 written; in backward their gradients: 2 read, 4 written
        casts += 6 * weights / memory
    if compute.quantized:
        casts += dequantized / facts.dequantized_params_per_second
    again = compute.recompute
    return _Sum(
        forward=forward + score,
        backward=backward
        + score_back
        + again * (forward * compute.recompute_products + (score if compute.recompute_attention else 0.0)),
        forward_bandwidth=moved + casts,
        backward_bandwidth=moved_back + casts + again * (moved + (casts if compute.quantized else 0.0)),
        forward_kernels=first.kernels,
        backward_kernels=second.kernels + again * first.kernels,
    )


def _product(product: Product, compute: Compute, facts: ClockFacts) -> tuple[float, float]:
    """Returns seconds of one product's forward and backward, its adapter included.

    Backward multiplies the gradient with the weight, and, where the weight trains, the input with the gradient.
    """
    rows = compute.tokens * product.rows_per_token // product.groups
    if product.groups > 1:
        rows = max(1, rows)
    inner, outer, groups = product.inner, product.outer, product.groups
    size = {"fp32": 4.0, "tf32": 4.0, "fp8": 1.0}.get(compute.dtype, 2.0)
    forward = product_seconds(rows, inner, outer, facts, size=size, groups=groups)
    backward = product_seconds(rows, outer, inner, facts, size=size, groups=groups)
    if compute.trains:
        backward += product_seconds(outer, rows, inner, facts, size=size, groups=groups)
    if product.adapted:
        rank, tokens = compute.rank, compute.tokens
        down = product_seconds(tokens, inner, rank, facts)
        up = product_seconds(tokens, rank, outer, facts)
        forward += down + up
        backward += 2 * (down + up)
    return forward, backward


def _add_loss(total: _Sum, model: ModelFacts, compute: Compute, facts: ClockFacts) -> None:
    """Adds the output head, its loss, and what a chunked loss computes twice."""
    vocabulary, tokens = model.vocab_size, compute.tokens
    if not vocabulary or model.objective is Objective.CLASSIFICATION:  # one row of classes per sample is nothing
        return
    size = 4 if compute.dtype in ("fp32", "tf32") else 2
    columns = max(1, vocabulary // compute.tensor_parallel)
    head = product_seconds(tokens, model.hidden_size, columns, facts)
    back = product_seconds(tokens, columns, model.hidden_size, facts)
    if compute.trains:
        back += product_seconds(model.hidden_size, tokens, columns, facts)
    if compute.chunked_loss and compute.trains:
        back += head
    total.forward += head
    total.backward += back
    if compute.fused_loss or compute.kernels is not Kernels.EAGER:
        there, again = loss_bytes(size, fused=True)
    else:
        there, again = loss_bytes(size, fused=False)
    total.forward_bandwidth += there * tokens * columns / facts.memory_bytes_per_second
    total.backward_bandwidth += again * tokens * columns / facts.memory_bytes_per_second


def loss_bytes(size: int, *, fused: bool) -> tuple[int, int]:
    """Returns bytes per logit that the loss moves in forward and in backward, the head's own result left out.

    A fused kernel reads the logits twice (their largest, their sum) and writes the gradient in their place, which
    backward scales. The chain casts them to fp32, takes log-softmax (read three times, written) and, back, reads it
    and writes the gradient, and casts that.

    Source: transformers 5.24.0 loss/loss_utils.py (upcast, cross_entropy); torch 2.13.0 log_softmax and its
        derivative; liger-kernel's cross entropy.
    """
    if fused:
        return 3 * size, 2 * size
    cast = size + 4 if size < 4 else 0
    return cast + 4 * 4, 2 * 4 + cast
