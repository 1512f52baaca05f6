"""What fully sharded data parallelism holds on one GPU: shards, gathered layers, buffers of the reduction.

Version 2 (`fully_shard`) as accelerate sets it up: each layer is a unit, the input embedding another, the final norm and
the head a third that stays gathered from its forward to its backward; a tied embedding belongs to that third. Version 1
wraps the layers and leaves everything else to the root, which stays gathered for the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import Method, Offload, Optimizer, Precision, TrainingConfig
from memc.facts.records import Block, ModelFacts
from memc.ledger.constants import LedgerFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.parts import AFTER_LOAD, ALWAYS, BACKWARD, TRAINING, gpu_entry
from memc.ledger.states import ParamCounts, nf4_bytes
from memc.units import ceil_div

_ACCELERATE = "accelerate utils/fsdp_utils.py fsdp2_prepare_model"
_GROUP = "torch distributed/fsdp/_fully_shard/_fsdp_param_group.py"
_REDUCE = "torch distributed/fsdp/_fully_shard/_fsdp_collectives.py foreach_reduce"
_FLAT = "torch distributed/fsdp/_flat_param.py, _runtime_utils.py"
_FIRST, _LAST = frozenset({Moment.BACKWARD_FIRST_LAYER}), frozenset({Moment.BACKWARD_LAST_LAYER})
_EMBEDDING = frozenset({Moment.BACKWARD_EMBEDDING})
_PASS = TRAINING - {Moment.STEP}


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What is gathered and reduced together, in elements; adapters count with the layer they sit in.

    Attributes:
        layer: The largest layer, base and adapters.
        layer_trainable: Its trainable elements.
        layers: All layers of the main stack.
        embedding: The input embedding, when it is a unit of its own.
        tail: The final norm and the head, with the embedding when it shares the head's tensor.
        tail_trainable: Its trainable elements.
        root: Everything else; gathered for the whole step.
    """

    layer: int
    layer_trainable: int
    layers: int
    embedding: int
    tail: int
    tail_trainable: int
    root: int


def adapter_params(block: Block, config: TrainingConfig) -> int:
    """Returns the adapter elements of one layer."""
    if config.lora is None:
        return 0
    targets, rank = frozenset(config.lora.target_modules), config.lora.rank
    return sum(rank * (lin.in_features + lin.out_features) for lin in block.linears if lin.name in targets)


def units(model: ModelFacts, config: TrainingConfig) -> Units:
    """Returns how FSDP divides a model.

    Source: accelerate utils/fsdp_utils.py: layers by class, then the input embedding, then final norm and head.
    """
    full = config.lora is None
    sizes = [(group.block.params + adapter_params(group.block, config), group) for group in model.groups]
    layer, largest = max(sizes, key=lambda item: item[0])
    trainable = layer if full else adapter_params(largest.block, config)
    layers = sum(size * group.count for size, group in sizes)
    base = sum(group.block.params * group.count for group in model.groups)
    outside = model.total_params - base
    if config.fsdp is not None and config.fsdp.version == 1:
        return Units(
            layer=layer,
            layer_trainable=trainable,
            layers=layers,
            embedding=0,
            tail=0,
            tail_trainable=0,
            root=outside,
        )
    tail = model.final_norm.params + (model.embedding_params if model.tied else model.head_params)
    embedding = 0 if model.tied else model.embedding_params
    return Units(
        layer=layer,
        layer_trainable=trainable,
        layers=layers,
        embedding=embedding,
        tail=tail,
        tail_trainable=tail if full else 0,
        root=outside - tail - embedding,
    )


def stored_bytes(config: TrainingConfig) -> int:
    """Returns bytes per trainable element of a shard and of its gradient.

    Source: accelerate turns trainable parameters to fp32 under mixed precision, unless some are 4-bit; FSDP keeps the
        shard's type for the reduced gradient.
    """
    if config.precision is Precision.BF16_PURE:
        return dtypes(config).gradient
    if config.method is Method.QLORA and config.lora is not None and config.fsdp is not None:
        return 4 if config.lora.precision.value == "fp32" else 2
    return 4


def fsdp_parameter_entries(
    model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts
) -> list[Entry]:
    """Returns the shards of base weights and adapters on one GPU, and what loading puts beside them."""
    assert config.fsdp is not None
    types, ranks, stored = dtypes(config), config.shard_ranks, stored_bytes(config)
    moves = config.fsdp.offload is not Offload.NONE
    entries = _base_shards(config, counts, facts, ranks, moves)
    share = ceil_div(counts.adapters, ranks)
    entries.append(
        gpu_entry(
            "adapter-shards",
            Account.PARAMETERS,
            0 if moves else stored * share,
            ALWAYS,
            f"{stored} B x {counts.adapters} elements / {ranks} ranks",
            _ACCELERATE,
        )
    )
    whole = stored if config.lora is None else types.weight
    largest = max([counts.largest_module, model.embedding_params, model.head_params])
    entries.append(
        gpu_entry(
            "tensor-being-sharded",
            Account.WORKSPACE,
            0 if config.method is Method.QLORA else whole * largest,
            frozenset({Moment.LOAD}),
            f"{whole} B x {largest} elements of the largest tensor, whole while it is cut",
            "accelerate utils/fsdp_utils.py fsdp2_load_full_state_dict",
        )
    )
    return entries


def _base_shards(
    config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts, ranks: int, moves: bool
) -> list[Entry]:
    """Returns the shards of the base model.

    A 4-bit base is cut in its storage type; its quantisation constants stay whole on every GPU, and so does the whole
    base until it is cut: it cannot be loaded on rank 0 alone.
    """
    types = dtypes(config)
    if config.method is not Method.QLORA:
        size = stored_bytes(config) if config.lora is None else types.weight
        share = ceil_div(counts.total, ranks)
        name = "weight-shards" if config.lora is None else "base-weight-shards"
        text = f"{size} B x {counts.total} elements / {ranks} ranks"
        return [gpu_entry(name, Account.PARAMETERS, 0 if moves else size * share, ALWAYS, text, _ACCELERATE)]
    codes = ceil_div(counts.quantized, 2)
    constants = nf4_bytes(counts.quantized, config.double_quantization, facts) - codes
    rest = counts.total - counts.quantized
    after = ALWAYS - {Moment.LOAD}
    source = "bitsandbytes nn/modules.py Params4bit; " + _ACCELERATE
    return [
        gpu_entry(
            "base-weight-shards-4bit",
            Account.PARAMETERS,
            ceil_div(codes, ranks),
            after,
            f"{codes} B of 4-bit codes / {ranks} ranks",
            source,
        ),
        gpu_entry(
            "quantization-constants",
            Account.PARAMETERS,
            constants,
            after,
            f"{constants} B of block constants of {counts.quantized} elements, whole on every GPU",
            source,
        ),
        gpu_entry(
            "base-weight-shards-unquantized",
            Account.PARAMETERS,
            types.weight * ceil_div(rest, ranks),
            after,
            f"{types.weight} B x {rest} elements of embedding, head, norms, biases / {ranks} ranks",
            _ACCELERATE,
        ),
        gpu_entry(
            "base-weights-before-sharding",
            Account.PARAMETERS,
            codes + constants + types.weight * rest,
            frozenset({Moment.LOAD}),
            f"{codes} + {constants} B of the 4-bit base + {types.weight} B x {rest} elements, whole on every GPU",
            source,
        ),
    ]


def fsdp_state_entries(model: ModelFacts, config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns gathered layers, gradients, optimizer states and reduction buffers on one GPU."""
    parts = units(model, config)
    return [*_gathered(config, parts), *_gradients(config, counts, parts), *_states(config, counts)]


def _gathered(config: TrainingConfig, parts: Units) -> list[Entry]:
    """Returns weights that are whole on the GPU: what runs, and what is gathered ahead.

    In forward the all-gather's output is kept until the next layer has copied its own out of it; in backward the next
    layer is gathered while one runs. Version 1 computes on the gathered buffer itself, and gathers one layer ahead.
    """
    assert config.fsdp is not None
    size, fsdp = dtypes(config).compute, config.fsdp
    source = _GROUP if fsdp.version == 2 else _FLAT
    ahead = fsdp.version == 2 or fsdp.backward_prefetch
    backward = 2 if ahead else 1
    entries = [
        gpu_entry(
            "gathered-layers-forward",
            Account.WORKSPACE,
            2 * size * parts.layer,
            frozenset({Moment.FORWARD, Moment.EVALUATE}),
            f"2 x {size} B x {parts.layer} elements: the layer that runs and one all-gather buffer",
            source,
        ),
        gpu_entry(
            "gathered-layers-backward",
            Account.WORKSPACE,
            backward * size * parts.layer,
            _FIRST | _LAST,
            f"{backward} x {size} B x {parts.layer} elements: the layer that runs" + (" and the next" if ahead else ""),
            source,
        ),
        gpu_entry(
            "gathered-head",
            Account.WORKSPACE,
            size * parts.tail,
            _PASS if not parts.embedding and parts.tail else frozenset({Moment.LOSS, Moment.EVALUATE}),
            f"{size} B x {parts.tail} elements of final norm and head, gathered until their backward",
            _ACCELERATE,
        ),
        gpu_entry(
            "gathered-embedding",
            Account.WORKSPACE,
            size * parts.embedding,
            _EMBEDDING,
            f"{size} B x {parts.embedding} elements",
            _ACCELERATE,
        ),
        gpu_entry(
            "gathered-root",
            Account.WORKSPACE,
            size * parts.root,
            _PASS | {Moment.EVALUATE},
            f"{size} B x {parts.root} elements outside layers" + (", embedding and head" if fsdp.version == 2 else ""),
            source,
        ),
    ]
    if not fsdp.reshard_after_forward:
        rest = max(0, parts.layers - backward * parts.layer)
        entries.append(
            gpu_entry(
                "gathered-model",
                Account.WORKSPACE,
                size * rest,
                frozenset({Moment.FORWARD, Moment.LOSS, Moment.EVALUATE}) | _FIRST,
                f"{size} B x {rest} elements of the other layers, gathered from their forward to their backward",
                source,
            )
        )
    return entries


def _gradients(config: TrainingConfig, counts: ParamCounts, parts: Units) -> list[Entry]:
    """Returns unsharded gradients of what runs, the buffers of the reduction, and the shards that it leaves.

    Gradients of a layer are whole in the compute type until they are copied into the reduction's buffer, which lives
    until the next layer's reduction needs one.
    """
    assert config.fsdp is not None
    fsdp, size, stored, ranks = config.fsdp, dtypes(config).compute, stored_bytes(config), config.shard_ranks
    source = _REDUCE if fsdp.version == 2 else _FLAT
    accumulates = config.gradient_accumulation_steps > 1
    whole = accumulates and not fsdp.reduce_each_micro_batch
    root_trains = parts.root if fsdp.version == 1 and config.lora is None else 0

    def buffer(name: str, elements: int, moments: frozenset[Moment], text: str, account: Account) -> Entry:
        return gpu_entry(name, account, size * elements, moments, f"{size} B x {elements} elements {text}", source)

    embedding = parts.embedding if config.lora is None else 0
    entries = [
        buffer("layer-gradients", parts.layer_trainable, _FIRST | _LAST, "of the layer that runs", Account.GRADIENTS),
        buffer("reduction-of-head", parts.tail_trainable, _FIRST, "of final norm and head", Account.WORKSPACE),
        buffer(
            "reduction-of-layer", parts.layer_trainable, _LAST | _EMBEDDING, "of the layer before", Account.WORKSPACE
        ),
        buffer("embedding-gradient", embedding, _EMBEDDING, "of the embedding", Account.GRADIENTS),
        buffer("root-gradients", root_trains, BACKWARD, "outside the layers", Account.GRADIENTS),
    ]
    if whole:
        entries.append(
            buffer(
                "accumulated-gradients",
                counts.trainable,
                TRAINING - {Moment.STEP},
                "not reduced until the last micro-batch",
                Account.GRADIENTS,
            )
        )
    if config.fsdp.hybrid and config.nodes > 1 and stored != size:
        share = ceil_div(counts.trainable, ranks)
        entries.append(
            buffer("all-reduce-buffers", share, BACKWARD, "waiting for the other nodes' sums", Account.WORKSPACE)
        )
    if fsdp.offload is Offload.NONE:
        entries += _gradient_shards(config, counts, kept=accumulates and not whole)
    return entries


def _gradient_shards(config: TrainingConfig, counts: ParamCounts, *, kept: bool) -> list[Entry]:
    """Returns this rank's reduced gradients, as backward leaves them; `kept` when micro-batches add up in them."""
    stored, ranks = stored_bytes(config), config.shard_ranks
    stays = TRAINING if kept else frozenset({Moment.STEP})
    middle = counts.trainable - counts.head - counts.embedding
    rows = (
        ("gradient-shards-head", counts.head, BACKWARD, "from the first layer of backward on"),
        ("gradient-shards-layers", middle, _LAST | _EMBEDDING, "complete at the last layer of backward"),
        ("gradient-shards-embedding", counts.embedding, _EMBEDDING, "after the last layer of backward"),
    )
    return [
        gpu_entry(
            name,
            Account.GRADIENTS,
            stored * ceil_div(elements, ranks),
            stays | moments,
            f"{stored} B x {elements} elements / {ranks} ranks, {when}"
            + (", kept while micro-batches accumulate" if kept else ""),
            _REDUCE,
        )
        for name, elements, moments, when in rows
    ]


def _states(config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns Adam's moments of this rank's shards, in the shards' type, and the step's temporaries."""
    assert config.fsdp is not None
    if config.fsdp.offload is not Offload.NONE:
        return []
    stored, ranks = stored_bytes(config), config.shard_ranks
    share = ceil_div(counts.trainable, ranks)
    foreach = config.optimizer is Optimizer.ADAMW_FOREACH
    return [
        gpu_entry(
            "adam-moments",
            Account.OPTIMIZER_STATES,
            2 * stored * share,
            AFTER_LOAD,
            f"2 moments x {stored} B x {counts.trainable} trainable elements / {ranks} ranks",
            "torch.optim.AdamW on DTensor shards",
        ),
        gpu_entry(
            "foreach-temporaries",
            Account.WORKSPACE,
            stored * share if foreach else 0,
            frozenset({Moment.STEP}),
            f"one temporary list: {stored} B x {share} elements",
            "torch.optim adam.py _multi_tensor_adam",
        ),
    ]
