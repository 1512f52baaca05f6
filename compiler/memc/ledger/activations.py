"""Activations on one GPU at each moment of the step."""

from __future__ import annotations

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


def checkpointed_layers(layers: int, every: int) -> int:
    """Returns how many of `layers` are checkpointed: those whose index is a multiple of `every` (0: none)."""
    return ceil_div(layers, every) if every else 0


def saved_per_token(block: Block, mode: LayerMode) -> int:
    """Returns bytes per token that one layer keeps without checkpointing."""
    return sum(item.bytes_per_token for item in saved_tensors(block, mode))


def _layer_entries(model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> list[Entry]:
    """Returns what layers keep, checkpointed and not."""
    tokens, every = config.micro_batch_tokens, config.checkpoint_every
    total, kept_layers, per_token = 0, 0, 0
    for group in model.groups:
        stored = group.count - checkpointed_layers(group.count, every)
        per_token = saved_per_token(group.block, mode)
        total += stored * per_token * tokens
        kept_layers += stored
    entries = [
        gpu_entry(
            "layer-activations",
            Account.ACTIVATIONS,
            total,
            _UNTIL_BACKWARD,
            f"{per_token} B/token/layer x {tokens} tokens x {kept_layers} layers",
            _SOURCE,
        )
    ]
    if every:
        layers = model.num_layers - kept_layers
        entries.append(
            gpu_entry(
                "layer-checkpoints",
                Account.ACTIVATIONS,
                mode.types.stream * model.hidden_size * tokens * layers,
                _UNTIL_BACKWARD,
                f"{mode.types.stream} B x hidden {model.hidden_size} x {tokens} tokens x {layers} layer inputs",
                _CHECKPOINT,
            )
        )
    recompute_last = bool(every) and (model.num_layers - 1) % every == 0
    if every:
        first = model.groups[0]
        size = saved_per_token(first.block, mode) * tokens
        again = frozenset({Moment.BACKWARD_LAST_LAYER})
        if recompute_last:
            again |= {Moment.BACKWARD_FIRST_LAYER}
        entries.append(
            gpu_entry(
                "layer-recomputed",
                Account.ACTIVATIONS,
                size,
                again,
                f"{size // tokens} B/token x {tokens} tokens of the layer that is recomputed",
                _CHECKPOINT,
            )
        )
    else:
        size = saved_per_token(model.groups[0].block, mode) * tokens
        entries.append(
            gpu_entry(
                "last-visited-layer",
                Account.ACTIVATIONS,
                size,
                frozenset({Moment.BACKWARD_LAST_LAYER}),
                f"{size // tokens} B/token x {tokens} tokens of the layer next to the embedding",
                _SOURCE,
            )
        )
    return entries


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
    if mode.trains:
        if types.weight == types.compute:
            return []
        per_layer = [
            (types.compute * sum(linear.weight_params for linear in group.block.linears), group.count)
            for group in model.groups
        ]
    elif types.adapter != types.compute:
        per_layer = [
            (
                types.compute
                * sum(
                    mode.rank * (linear.in_features + linear.out_features)
                    for linear in group.block.linears
                    if linear.name in mode.adapted
                ),
                group.count,
            )
            for group in model.groups
        ]
    else:
        return []
    cached = sum(size * count for size, count in per_layer)
    stored = sum(size * (count - checkpointed_layers(count, config.checkpoint_every)) for size, count in per_layer)
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
