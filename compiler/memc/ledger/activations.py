"""Activations on one GPU at each moment of the step."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import LossHead, TrainingConfig
from memc.facts.records import Block, ModelFacts, NormKind
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.layer import LayerMode, layer_mode, saved_tensors
from memc.ledger.parts import gpu_entry
from memc.ledger.working import Widths, last_weight_gradient_bytes, working_set
from memc.units import ceil_div

_SOURCE = "transformers modelling code, torch autograd"
_CHECKPOINT = "transformers activation_checkpointing_enable(every_n_layers), torch.utils.checkpoint"
_EMBEDDING_SORTS_ABOVE_TOKENS = 3072
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
    """Returns temporaries of the layer that is running, the gradient of the stream, the final norm, rotary tables."""
    return [*_running_layer(model, config, mode), *_outside_layers(model, config, mode)]


def _running_layer(model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> list[Entry]:
    """Returns what the running layer holds beyond what it keeps, at each moment."""
    tokens, every = config.micro_batch_tokens, config.checkpoint_every
    working, size = working_set(mode), mode.types.compute
    first, last = model.groups[0].block, model.groups[-1].block
    recomputes_last = bool(every) and (model.num_layers - 1) % every == 0

    def entry(name: str, block: Block, widths: Widths, extra: int, moments: frozenset[Moment]) -> Entry:
        per_token = widths.per_token(model.hidden_size, block.mlp.intermediate, size)
        text = (
            f"({widths.hidden} x hidden {model.hidden_size} + {widths.inner} x inner {block.mlp.intermediate})"
            f" B/token x {tokens} tokens" + (f" + {extra} B weight gradient" if extra else "")
        )
        return gpu_entry(name, Account.ACTIVATIONS, per_token * tokens + extra, moments, text, _SOURCE)

    forward = working.forward_checkpointed if recomputes_last else working.forward_kept
    return [
        entry("forward-working-set", last, forward, 0, frozenset({Moment.FORWARD})),
        entry("evaluation-working-set", last, working.forward_checkpointed, 0, frozenset({Moment.EVALUATE})),
        entry(
            "backward-working-set-highest-layer",
            last,
            working.recomputed if recomputes_last else working.backward,
            last_weight_gradient_bytes(last, mode),
            frozenset({Moment.BACKWARD_FIRST_LAYER}),
        ),
        entry(
            "backward-working-set-lowest-layer",
            first,
            working.recomputed if every else working.backward,
            last_weight_gradient_bytes(first, mode),
            frozenset({Moment.BACKWARD_LAST_LAYER}),
        ),
    ]


def _outside_layers(model: ModelFacts, config: TrainingConfig, mode: LayerMode) -> list[Entry]:
    """Returns the stream's gradient, what the final norm keeps, the embedding's backward kernel, rotary tables."""
    tokens, types, hidden = config.micro_batch_tokens, mode.types, model.hidden_size
    backward = frozenset({Moment.BACKWARD_FIRST_LAYER, Moment.BACKWARD_LAST_LAYER})
    final = _final_norm_per_token(model, mode)
    head_dim = model.groups[0].block.attention.head_dim
    sorted_rows = tokens // 10 + min(tokens, model.vocab_size)
    kernel = 40 * tokens + 4 * hidden * sorted_rows if mode.trains and tokens > _EMBEDDING_SORTS_ABOVE_TOKENS else 0
    return [
        gpu_entry(
            "residual-stream-gradient",
            Account.ACTIVATIONS,
            types.stream * hidden * tokens,
            backward | ({Moment.BACKWARD_EMBEDDING} if mode.trains else frozenset()),
            f"{types.stream} B x hidden {hidden} x {tokens} tokens",
            _SOURCE,
        ),
        gpu_entry(
            "final-norm",
            Account.ACTIVATIONS,
            final * tokens,
            frozenset({Moment.LOSS}),
            f"{final} B/token x {tokens} tokens of the norm before the head",
            _SOURCE,
        ),
        gpu_entry(
            "embedding-backward-kernel",
            Account.WORKSPACE,
            kernel,
            frozenset({Moment.BACKWARD_EMBEDDING}),
            f"40 B x {tokens} tokens + 4 B x hidden {hidden} x {sorted_rows} partial sums",
            "torch EmbeddingBackwardKernel.cu",
        ),
        gpu_entry(
            "rotary-tables",
            Account.ACTIVATIONS,
            2 * types.stream * head_dim * config.max_length,
            _UNTIL_BACKWARD | {Moment.BACKWARD_LAST_LAYER, Moment.EVALUATE},
            f"cos and sin: 2 x {types.stream} B x {head_dim} x {config.max_length} positions",
            _SOURCE,
        ),
    ]


def _final_norm_per_token(model: ModelFacts, mode: LayerMode) -> int:
    """Returns bytes per token that the norm before the head keeps."""
    norm, types = model.final_norm, mode.types
    if norm.kind is NormKind.LAYER:
        return types.stream * norm.width + 8
    trained = 4 if norm.kind is NormKind.RMS_FP32_WEIGHT else types.stream
    return 4 * norm.width + 4 + (trained * norm.width if mode.trains else 0)


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
