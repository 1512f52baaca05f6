"""What one layer keeps for backward, tensor by tensor, in bytes per token."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import Attention, Method, TrainingConfig
from memc.facts.records import Block, Linear, Norm, NormKind
from memc.ledger.dtypes import Dtypes, dtypes


@dataclass(frozen=True, slots=True)
class Saved:
    """One kind of tensor that autograd keeps between forward and backward of a layer.

    Attributes:
        name: What it is.
        bytes_per_token: Its size.
        formula: How that comes about, with the numbers.
    """

    name: str
    bytes_per_token: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMode:
    """The part of a configuration that decides what a layer keeps.

    Attributes:
        trains: Whether the base weights train.
        adapted: Names of the linears that carry an adapter.
        rank: LoRA rank; 0 without adapters.
        dropout: Whether adapter inputs pass through dropout.
        attention: Attention implementation.
        mask: Whether a mask reaches the attention kernel.
        length: Tokens of one sequence.
        types: Element sizes.
    """

    trains: bool
    adapted: frozenset[str]
    rank: int
    dropout: bool
    attention: Attention
    mask: bool
    length: int
    types: Dtypes


def layer_mode(config: TrainingConfig) -> LayerMode:
    """Returns the layer mode of a configuration."""
    lora = config.lora
    return LayerMode(
        trains=config.method is Method.FULL,
        adapted=frozenset(lora.target_modules) if lora is not None else frozenset(),
        rank=lora.rank if lora is not None else 0,
        dropout=lora is not None and lora.dropout > 0,
        attention=config.attention,
        mask=config.padding_mask,
        length=config.max_length,
        types=dtypes(config),
    )


def saved_tensors(block: Block, mode: LayerMode) -> tuple[Saved, ...]:
    """Returns what one layer keeps per token when it is not checkpointed.

    Follows the operations of the block in order; a tensor that two operations keep is counted once.

    Assumes: dropout inside the model is 0 (the default of every described family).
    Source: autograd formulas of torch (derivatives.yaml) applied to the transformers modelling code.
    """
    saved: list[Saved] = []
    inputs: dict[str, int] = {"attention_output": mode.types.compute, "mlp_product": mode.types.compute}
    for norm in block.norms:
        kept, output = _norm(norm, mode)
        saved.append(kept)
        if norm.feeds:
            inputs[norm.feeds] = output
    saved += _linear_inputs(block, mode, inputs)
    saved += _attention(block, mode)
    saved += _mlp(block, mode)
    return tuple(item for item in saved if item.bytes_per_token)


def _norm(norm: Norm, mode: LayerMode) -> tuple[Saved, int]:
    """Returns what a norm keeps and the element size of its output."""
    types = mode.types
    width, rows = norm.width, norm.rows
    entering = types.stream if norm.feeds else types.compute
    if norm.kind is NormKind.LAYER:
        kept = 4 if types.autocast else entering
        text = f"{norm.name}: {kept} x {width} input + 8 x {rows} mean, rstd"
        return Saved(norm.name, kept * width + 8 * rows, text), 4 if types.autocast else entering
    size = 4 * width + 4 * rows
    text = f"{norm.name}: 4 x {width} fp32 input + 4 x {rows} rstd"
    if norm.kind is NormKind.RMS_FP32_WEIGHT:
        if mode.trains:
            size += 4 * width
            text += f" + 4 x {width} normalised fp32 for the weight gradient"
        return Saved(norm.name, size, text), entering
    if mode.trains:
        size += entering * width
        text += f" + {entering} x {width} normalised for the weight gradient"
    return Saved(norm.name, size, text), max(types.weight, entering)


def _linear_inputs(block: Block, mode: LayerMode, inputs: dict[str, int]) -> list[Saved]:
    """Returns the inputs that linears and adapters keep for their weight gradients."""
    types = mode.types
    saved: list[Saved] = []
    shared: set[str] = set()
    for linear in block.linears:
        entering = inputs.get(linear.reads, types.compute)
        if mode.trains:
            if entering == types.compute:
                shared.add(linear.reads)
            else:
                size = types.compute * linear.in_features
                saved.append(
                    Saved(f"{linear.name} input", size, f"{types.compute} x {linear.in_features} autocast copy")
                )
        elif linear.name in mode.adapted:
            saved += _adapter(linear, mode, entering, shared)
    widths = {linear.reads: linear.in_features for linear in block.linears}
    kernel_keeps_output = mode.attention is not Attention.EAGER and not block.attention.fused_qkv
    for reads in sorted(shared):
        if reads == "attention_output" and kernel_keeps_output:
            continue
        size = types.compute * widths[reads]
        saved.append(Saved(reads, size, f"{types.compute} x {widths[reads]} shared by the linears that read it"))
    return saved


def _adapter(linear: Linear, mode: LayerMode, entering: int, shared: set[str]) -> list[Saved]:
    """Returns what the adapter of one linear keeps; adds to `shared` when it keeps the linear's own input."""
    types, width = mode.types, linear.in_features
    runs = types.compute if types.autocast else types.adapter
    saved: list[Saved] = []
    if entering == types.adapter == runs and not mode.dropout:
        shared.add(linear.reads)
    else:
        saved.append(
            Saved(f"{linear.name} adapter input", runs * width, f"{runs} x {width} copy in the adapter's type")
        )
    if mode.dropout:
        saved.append(Saved(f"{linear.name} dropout mask", width, f"1 x {width} bool"))
    saved.append(Saved(f"{linear.name} adapter inner", runs * mode.rank, f"{runs} x rank {mode.rank}"))
    return saved


def _attention(block: Block, mode: LayerMode) -> list[Saved]:
    """Returns what rotary embedding and the attention kernel keep.

    A window that cuts the sequence needs a mask, and a mask takes the memory-efficient kernel with repeated k and v.
    Where one linear makes q, k and v, its output stays whole and the kernel's output is copied before the projection.
    """
    facts, size, length = block.attention, mode.types.compute, mode.length
    query, key, heads = facts.query_width, facts.key_width, facts.heads
    if mode.attention is Attention.EAGER:
        scores = (4 + size) * heads * length
        saved = [
            Saved("q, repeated k and v", 3 * size * query, f"{size} x (3 x {query})"),
            Saved("attention probabilities", scores, f"(4 + {size}) x {heads} heads x {length} keys, fp32 and cast"),
        ]
        if facts.logit_softcap is not None:
            saved.append(Saved("softcapped scores", size * heads * length, f"{size} x {heads} x {length}"))
        return saved
    statistics = Saved("log-sum-exp", 4 * heads, f"4 x {heads} heads")
    windowed = facts.sliding_window is not None and length >= facts.sliding_window
    if (mode.mask or windowed) and mode.attention is Attention.SDPA:
        return [
            Saved("q, repeated k and v, output", 4 * size * query, f"{size} x (4 x {query}), memory-efficient kernel"),
            statistics,
            Saved("attention mask", size * length, f"{size} x {length} keys, one copy per layer"),
        ]
    if facts.fused_qkv:
        kept = size * (3 * query + 3 * key)
        text = f"{size} x (3 x {query} + 3 x {key}): q, k, v in one tensor, rotated copies, output; flash kernel"
        return [Saved("fused q, k, v, rotated q and k, output", kept, text), statistics]
    kept = size * (2 * query + 2 * key)
    return [Saved("q, k, v, output", kept, f"{size} x (2 x {query} + 2 x {key}), flash kernel"), statistics]


def _mlp(block: Block, mode: LayerMode) -> list[Saved]:
    """Returns what the activation function and the gate keep; the product is a linear's input."""
    facts, size = block.mlp, mode.types.compute
    if facts.gated:
        return [Saved("gate, act(gate), up", 3 * size * facts.intermediate, f"{size} x (3 x {facts.intermediate})")]
    return [Saved("activation input", size * facts.intermediate, f"{size} x {facts.intermediate}")]
