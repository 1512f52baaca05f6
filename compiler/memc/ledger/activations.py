"""Activations on one GPU at each moment of the step."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import LossHead, TrainingConfig
from memc.facts.records import Block, ModelFacts, NormKind
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.layer import LayerMode, layer_mode, saved_tensors
from memc.ledger.parts import gpu_entry
from memc.units import ceil_div

_SOURCE = "transformers modelling code, torch autograd"
_CHECKPOINT = "transformers activation_checkpointing_enable(every_n_layers), torch.utils.checkpoint"
_UNTIL_BACKWARD = frozenset({Moment.FORWARD, Moment.LOSS, Moment.BACKWARD_FIRST_LAYER})


def activation_entries(model: ModelFacts, config: TrainingConfig) -> list[Entry]:
    """Returns saved activations, checkpoints, weight caches and the working set of one layer.

    Assumes: layers of one group are alike; backward frees a layer's activations when it is done with it.
    """
    mode = layer_mode(config)
    entries = _layer_entries(model, config, mode)
    entries += _working_entries(model, config, mode)
    if mode.types.autocast:
        entries += _weight_cache(model, config, mode)
    return entries


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one shape under a checkpointing setting.

    Attributes:
        block: Their shape.
        kept: How many keep all their activations.
        checkpointed: How many keep their input only.
    """

    block: Block
    kept: int
    checkpointed: int


def layer_groups(model: ModelFacts, every: int) -> tuple[LayerGroup, ...]:
    """Returns the layers of a model, split by whether they are checkpointed.

    Source: transformers modeling_utils._set_gradient_checkpointing: layer i is checkpointed when i % every == 0,
        counted over the whole model (every 0: none).
    """
    groups, first = [], 0
    for group in model.groups:
        after = first + group.count
        marked = ceil_div(after, every) - ceil_div(first, every) if every else 0
        groups.append(LayerGroup(group.block, group.count - marked, marked))
        first = after
    return tuple(groups)


def saved_per_token(block: Block, mode: LayerMode) -> int:
    """Returns bytes per token that one layer keeps without checkpointing."""
    return sum(item.bytes_per_token for item in saved_tensors(block, mode))


def _layer_entries(model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> list[Entry]:
    """Returns what layers keep, checkpointed and not, and the one that backward recomputes."""
    tokens, every = config.micro_batch_tokens, config.checkpoint_every
    groups = layer_groups(model, every)
    kept = [(saved_per_token(group.block, mode), group.kept) for group in groups if group.kept]
    inputs = sum(group.checkpointed for group in groups)
    stream = mode.types.stream
    entries = [
        gpu_entry(
            "layer-activations",
            Account.ACTIVATIONS,
            sum(size * count for size, count in kept) * tokens,
            _UNTIL_BACKWARD,
            f"{_summed(kept)} B/token x {tokens} tokens",
            _SOURCE,
        ),
        gpu_entry(
            "layer-checkpoints",
            Account.ACTIVATIONS,
            stream * model.hidden_size * tokens * inputs,
            _UNTIL_BACKWARD,
            f"{stream} B x hidden {model.hidden_size} x {tokens} tokens x {inputs} layer inputs",
            _CHECKPOINT,
        ),
    ]
    lowest, highest = saved_per_token(groups[0].block, mode), saved_per_token(groups[-1].block, mode)
    recomputes_last = bool(every) and (model.num_layers - 1) % every == 0
    what = "recomputed" if every else "still kept"
    entries.append(
        gpu_entry(
            "lowest-layer",
            Account.ACTIVATIONS,
            lowest * tokens,
            frozenset({Moment.BACKWARD_LAST_LAYER}),
            f"{lowest} B/token x {tokens} tokens of the layer next to the embedding, {what}",
            _CHECKPOINT if every else _SOURCE,
        )
    )
    entries.append(
        gpu_entry(
            "highest-layer-recomputed",
            Account.ACTIVATIONS,
            highest * tokens if recomputes_last else 0,
            frozenset({Moment.BACKWARD_FIRST_LAYER}),
            f"{highest} B/token x {tokens} tokens of the layer next to the head",
            _CHECKPOINT,
        )
    )
    return entries


def _summed(parts: list[tuple[int, int]]) -> str:
    """Returns the sum of size x count as text, equal sizes together."""
    counts: dict[int, int] = {}
    for size, count in parts:
        counts[size] = counts.get(size, 0) + count
    text = " + ".join(f"{size} x {count} layers" for size, count in counts.items())
    return f"({text})" if len(counts) > 1 else text or "0"


def _working_entries(model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> list[Entry]:
    """Returns temporaries of the layer that is running, the final norm, and rotary tables."""
    tokens, types = config.micro_batch_tokens, mode.types
    block = model.groups[0].block
    forward = forward_working_per_token(block, mode) * tokens
    backward = backward_working_per_token(block, mode, model.hidden_size) * tokens
    hidden = types.stream * model.hidden_size * tokens
    norm = model.final_norm
    final = (4 * norm.width + 4) * tokens + (4 if mode.trains and types.stream == 4 else 2) * norm.width * tokens * (
        1 if mode.trains else 0
    )
    if norm.kind is NormKind.LAYER:
        final = (types.stream * norm.width + 8) * tokens
    return [
        gpu_entry(
            "forward-working-set",
            Account.ACTIVATIONS,
            forward,
            frozenset({Moment.FORWARD, Moment.EVALUATE}),
            f"{forward // tokens} B/token x {tokens} tokens: temporaries of the running layer",
            _SOURCE,
        ),
        gpu_entry(
            "backward-working-set",
            Account.ACTIVATIONS,
            backward,
            frozenset({Moment.BACKWARD_FIRST_LAYER, Moment.BACKWARD_LAST_LAYER}),
            f"{backward // tokens} B/token x {tokens} tokens: gradients inside the running layer",
            _SOURCE,
        ),
        gpu_entry(
            "embedding-gradient-stream",
            Account.ACTIVATIONS,
            hidden if mode.trains else 0,
            frozenset({Moment.BACKWARD_EMBEDDING}),
            f"{types.stream} B x hidden {model.hidden_size} x {tokens} tokens",
            _SOURCE,
        ),
        gpu_entry(
            "final-norm",
            Account.ACTIVATIONS,
            final,
            frozenset({Moment.LOSS}),
            f"{final // tokens} B/token x {tokens} tokens of the norm before the head",
            _SOURCE,
        ),
        gpu_entry(
            "rotary-tables",
            Account.ACTIVATIONS,
            2 * types.stream * block.attention.head_dim * config.max_length,
            _UNTIL_BACKWARD | {Moment.BACKWARD_LAST_LAYER, Moment.EVALUATE},
            f"cos and sin: 2 x {types.stream} B x {block.attention.head_dim} x {config.max_length} positions",
            _SOURCE,
        ),
    ]


def forward_working_per_token(block: Block, mode: LayerMode) -> int:
    """Returns bytes per token that a running layer holds beyond what it keeps, in forward."""
    size = mode.types.compute
    return 2 * size * block.mlp.intermediate


def backward_working_per_token(block: Block, mode: LayerMode, hidden: int) -> int:
    """Returns bytes per token of gradients inside a layer, at their largest, in backward."""
    size = mode.types.compute
    return 2 * size * block.mlp.intermediate + (mode.types.stream + 4) * hidden


def _weight_cache(model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> list[Entry]:
    """Returns the 16-bit copies of trainable fp32 weights that autocast keeps.

    Source: torch autocast weight cache: alive until autocast exits after the forward; what a layer saves for backward
        stays until that layer's backward.
    """
    types = mode.types
    if types.weight == types.compute and types.adapter == types.compute:
        return []
    per_layer = [
        (types.compute * _cast_params(group.block, mode), group)
        for group in layer_groups(model, config.checkpoint_every)
    ]
    cached = sum(size * (group.kept + group.checkpointed) for size, group in per_layer)
    stored = sum(size * group.kept for size, group in per_layer)
    one = per_layer[0][0]
    head = 0
    if mode.trains and config.loss is LossHead.PLAIN:
        head = types.compute * (model.head_params or model.embedding_params)
    source = "torch autocast_mode.cpp cached_cast"
    return [
        gpu_entry(
            "autocast-weight-cache",
            Account.PARAMETERS,
            cached,
            frozenset({Moment.FORWARD, Moment.LOSS}),
            f"{types.compute} B x {cached // types.compute} trainable elements of linears, until the forward ends",
            source,
        ),
        gpu_entry(
            "autocast-head-copy",
            Account.PARAMETERS,
            head,
            frozenset({Moment.LOSS}),
            f"{types.compute} B x {head // types.compute} elements of the output head",
            source,
        ),
        gpu_entry(
            "autocast-saved-weights",
            Account.PARAMETERS,
            stored or one,
            frozenset({Moment.BACKWARD_FIRST_LAYER}),
            f"{types.compute} B x {(stored or one) // types.compute} elements that backward still needs",
            source,
        ),
        gpu_entry(
            "autocast-layer-weights",
            Account.PARAMETERS,
            one,
            frozenset({Moment.BACKWARD_LAST_LAYER}),
            f"{types.compute} B x {one // types.compute} elements of the running layer",
            source,
        ),
    ]


def _cast_params(block: Block, mode: LayerMode) -> int:
    """Returns the trainable elements of one layer's linears that are not in the compute type."""
    if mode.trains:
        return sum(linear.weight_params for linear in block.linears) if mode.types.weight != mode.types.compute else 0
    if mode.types.adapter == mode.types.compute:
        return 0
    adapted = [linear for linear in block.linears if linear.name in mode.adapted]
    return sum(mode.rank * (linear.in_features + linear.out_features) for linear in adapted)
