"""What fully sharded data parallelism holds on one GPU: shards, gathered layers, buffers of the reduction.

Version 2 (`fully_shard`) as accelerate sets it up, and version 1 (FullyShardedDataParallel) wrapped by layer.
"""

from __future__ import annotations

from memc.config import LossHead, Method, Offload, Optimizer, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.constants import LedgerFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.fsdp_units import Units, stored_bytes, units
from memc.ledger.parts import AFTER_LOAD, ALWAYS, BACKWARD, TRAINING, cached_entry, gpu_entry
from memc.ledger.states import ParamCounts, quantized_bytes
from memc.units import ceil_div

_ACCELERATE = "accelerate utils/fsdp_utils.py fsdp2_prepare_model"
_GROUP = "torch distributed/fsdp/_fully_shard/_fsdp_param_group.py"
_REDUCE = "torch distributed/fsdp/_fully_shard/_fsdp_collectives.py foreach_reduce"
_FLAT = "torch distributed/fsdp/_flat_param.py, _runtime_utils.py"
_FIRST, _LAST = frozenset({Moment.BACKWARD_FIRST_LAYER}), frozenset({Moment.BACKWARD_LAST_LAYER})
_EMBEDDING = frozenset({Moment.BACKWARD_EMBEDDING})
_PASS = TRAINING - {Moment.STEP}


def fsdp_parameter_entries(
    model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts
) -> list[Entry]:
    """Returns the shards of base weights and adapters on one GPU, and what loading puts beside them."""
    assert config.fsdp is not None
    types, ranks, stored = dtypes(config), config.shard_ranks, stored_bytes(config)
    moves = config.fsdp.offload is not Offload.NONE
    entries = _base_shards(model, config, counts, facts)
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
    largest = largest_tensor(model)
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


def _base_shards(model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> list[Entry]:
    """Returns the shards of the base model.

    A 4-bit base is cut in its storage type; its quantisation constants stay whole on every GPU. It cannot be loaded on
    rank 0 alone: every rank quantises all of it, layer by layer as it cuts it, or whole before that.
    """
    assert config.fsdp is not None
    types, ranks, moves = dtypes(config), config.shard_ranks, config.fsdp.offload is not Offload.NONE
    if config.method is not Method.QLORA:
        size = stored_bytes(config) if config.lora is None else types.weight
        share = ceil_div(counts.total, ranks)
        name = "weight-shards" if config.lora is None else "base-weight-shards"
        text = f"{size} B x {counts.total} elements / {ranks} ranks"
        return [gpu_entry(name, Account.PARAMETERS, 0 if moves else size * share, ALWAYS, text, _ACCELERATE)]
    codes = ceil_div(counts.quantized, 2)
    constants = quantized_bytes(config, counts, facts)[0] - codes
    rest = counts.total - counts.quantized
    by_layer = config.quantizes_layer_by_layer
    after = ALWAYS if by_layer else AFTER_LOAD
    source = "bitsandbytes nn/modules.py Params4bit; " + _ACCELERATE
    whole = codes + constants + types.weight * rest
    before = gpu_entry(
        "base-weights-before-sharding",
        Account.PARAMETERS,
        whole,
        frozenset({Moment.LOAD}),
        f"{codes} + {constants} B of the 4-bit base + {types.weight} B x {rest} elements, whole on every GPU",
        source,
    )
    return [
        _being_quantized(model, config, facts) if by_layer else before,
        gpu_entry(
            "base-weight-shards-4bit",
            Account.PARAMETERS,
            0 if moves else ceil_div(codes, ranks),
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
            0 if moves else types.weight * ceil_div(rest, ranks),
            after,
            f"{types.weight} B x {rest} elements of embedding, head, norms, biases / {ranks} ranks",
            _ACCELERATE,
        ),
    ]


def _being_quantized(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> Entry:
    """Returns what lies whole on the GPU beside the shards while a 4-bit base is cut layer by layer.

    Of a layer its codes, and in 16 bits with its block maxima in fp32 the linear that is quantised. Then embedding,
    head and what else there is: accelerate names the weights of embedding and head until all is cut. By that time
    these two have shards of their own, which no layer finds.
    """
    parts, size, ranks = units(model, config), dtypes(config).weight, config.shard_ranks
    largest = max(linear.weight_params for group in model.groups for linear in group.block.linears)
    outside = parts.embedding + parts.tail + parts.root
    quantizing = parts.layer + size * largest + 4 * ceil_div(largest, facts.nf4_block_params)
    of_a_layer = quantizing - outside // ranks
    text = (
        f"{parts.embedding} + {parts.tail} + {parts.root} B of embedding, head and the rest, whole while they are cut"
    )
    if of_a_layer > outside:
        text = (
            f"{parts.layer} B of a layer + {size} B x {largest} elements of its largest linear, less shards yet to be"
        )
    return gpu_entry(
        "unit-being-sharded",
        Account.WORKSPACE,
        max(outside, of_a_layer),
        frozenset({Moment.LOAD}),
        text,
        f"{_ACCELERATE} (input_weight, output_weight); bitsandbytes nn/modules.py Params4bit.to",
    )


def fsdp_state_entries(model: ModelFacts, config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns gathered layers, gradients, optimizer states and reduction buffers on one GPU."""
    parts = units(model, config)
    saved = _tensor_being_saved(model, config)
    gradients = [*_gradients(config, counts, parts), *_reduction_stream(config, counts, parts)]
    return [*_gathered(config, parts), *gradients, *_states(config, counts), saved]


def largest_tensor(model: ModelFacts) -> int:
    """Returns the elements of the largest tensor of a model, embedding and head included."""
    blocks = [group.block for group in model.groups]
    linears = [linear.weight_params for block in blocks for linear in block.linears]
    return max([*linears, *(tensor.params for block in blocks for tensor in block.tensors), *_outside(model)])


def _outside(model: ModelFacts) -> tuple[int, int]:
    return model.embedding_params, model.head_params


def _tensor_being_saved(model: ModelFacts, config: TrainingConfig) -> Entry:
    """Returns the tensor that is whole on the GPU while weights are gathered for a file; 4-bit ones are smaller.

    Source: accelerate get_state_dict, full and moved to the host tensor by tensor; torch _state_dict_utils.py
        _iterate_state_dict, full_tensor.
    """
    quantized = config.method is Method.QLORA
    size = stored_bytes(config) if config.lora is None else dtypes(config).weight
    largest = max(_outside(model)) if quantized else largest_tensor(model)
    return gpu_entry(
        "tensor-being-saved",
        Account.WORKSPACE,
        size * largest,
        frozenset({Moment.SAVE}),
        f"{size} B x {largest} elements of the largest tensor{' outside the 4-bit base' if quantized else ''}",
        "accelerate accelerator.py get_state_dict; torch distributed/_state_dict_utils.py",
    )


def _gathered(config: TrainingConfig, parts: Units) -> list[Entry]:
    """Returns weights that are whole on the GPU: what runs, and what is gathered ahead.

    In forward the all-gather's output is kept until the next layer has copied its own out of it; in backward the next
    layer is gathered while one runs. Version 1 computes on the gathered buffer itself, and gathers one layer ahead.
    """
    assert config.fsdp is not None
    fsdp = config.fsdp
    source = _GROUP if fsdp.version == 2 else _FLAT
    ahead = fsdp.version == 2 or fsdp.backward_prefetch
    backward = 2 if ahead else 1
    evaluate, loss = frozenset({Moment.EVALUATE}), frozenset({Moment.LOSS})
    kept = 0 if fsdp.reshard_after_forward else max(0, parts.layers - backward * parts.layer)
    rows = (
        (
            "gathered-layers-forward",
            2 * parts.layer,
            frozenset({Moment.FORWARD}) | evaluate,
            f"2 x {parts.layer} B: the layer that runs and one all-gather buffer",
            source,
        ),
        (
            "gathered-layers-backward",
            backward * parts.layer,
            _FIRST | _LAST,
            f"{backward} x {parts.layer} B: the layer that runs" + (" and the next" if ahead else ""),
            source,
        ),
        (
            "gathered-head",
            parts.tail,
            loss | evaluate | (_PASS if not parts.embedding else frozenset()),
            f"{parts.tail} B of final norm and head, gathered until their backward",
            _ACCELERATE,
        ),
        (
            "gathered-layer-ahead",
            parts.layer if fsdp.version == 2 else 0,
            loss,
            f"{parts.layer} B: the last layer's all-gather buffer, and what is gathered while the head runs backward",
            source,
        ),
        (
            "gathered-embedding",
            parts.embedding,
            _EMBEDDING if fsdp.reshard_after_forward else _PASS | evaluate,
            f"{parts.embedding} B",
            _ACCELERATE,
        ),
        (
            "gathered-root",
            parts.root,
            _PASS | evaluate,
            f"{parts.root} B outside layers" + (", embedding and head" if fsdp.version == 2 else ""),
            source,
        ),
        (
            "gathered-model",
            kept,
            frozenset({Moment.FORWARD}) | evaluate | _FIRST,
            f"{kept} B of the other layers, gathered from their forward to their backward",
            source,
        ),
        (
            "gathered-model-at-loss",
            0 if fsdp.reshard_after_forward else parts.layers,
            loss,
            f"{parts.layers} B of all layers, gathered from their forward to their backward",
            source,
        ),
    )
    return [
        gpu_entry(name, Account.WORKSPACE, bytes_, moments, text, where) for name, bytes_, moments, text, where in rows
    ]


def _gradients(config: TrainingConfig, counts: ParamCounts, parts: Units) -> list[Entry]:
    """Returns unsharded gradients of what runs, the buffers of the reduction, and the shards that it leaves.

    Gradients of a layer are whole in the compute type until they are copied into the reduction's buffer, which lives
    until the next layer's reduction needs one.
    """
    assert config.fsdp is not None
    fsdp, size, stored, ranks = config.fsdp, dtypes(config).compute, stored_bytes(config), config.shard_ranks
    full, accumulates = config.lora is None, config.gradient_accumulation_steps > 1
    whole = accumulates and not fsdp.reduce_each_micro_batch
    across = fsdp.hybrid and config.nodes > 1 and stored != size
    gradient, work = Account.GRADIENTS, Account.WORKSPACE
    trainable = size * gradient_elements(config, counts)
    tied = full and counts.tied_head > 0 and fsdp.version == 2
    wider = 4 // size if fsdp.reduce_fp32 else 1
    rows = (
        ("layer-gradients", gradient, parts.layer_gradient, _FIRST | _LAST, "of the layer that runs"),
        ("reduction-of-head", work, wider * parts.tail if full and not tied else 0, _FIRST, "of final norm and head"),
        ("tied-head-gradient", gradient, parts.tail if tied else 0, BACKWARD, "waiting for that of the embedding"),
        ("reduction-of-layer", work, wider * parts.layer_gradient, _LAST | _EMBEDDING, "of the layer before"),
        (
            "reduction-of-embedding",
            work,
            wider * parts.embedding if full and fsdp.reduce_fp32 else 0,
            _EMBEDDING,
            "of the embedding, in fp32",
        ),
        (
            "embedding-gradient",
            gradient,
            (parts.tail if tied else parts.embedding) if full else 0,
            _EMBEDDING,
            "of the embedding",
        ),
        ("root-gradients", gradient, parts.root if full and fsdp.version == 1 else 0, BACKWARD, "outside the layers"),
        (
            "accumulated-gradients",
            gradient,
            trainable if whole else 0,
            _PASS,
            "reduced with the last micro-batch",
        ),
        ("all-reduce-buffers", work, ceil_div(trainable, ranks) if across else 0, BACKWARD, "waiting for other nodes"),
    )
    source = _REDUCE if fsdp.version == 2 else _FLAT
    entries = [
        gpu_entry(name, account, bytes_, moments, f"{bytes_} B {text}", source)
        for name, account, bytes_, moments, text in rows
    ]
    if fsdp.offload is Offload.NONE:
        entries += _gradient_shards(config, counts, kept=accumulates and not whole, reduced=not whole)
    return entries


def _reduction_stream(config: TrainingConfig, counts: ParamCounts, parts: Units) -> list[Entry]:
    """Returns what the reduction's stream holds while no gradient is in it: its memory serves that stream alone.

    Gradients in the shards' type, and the last reduction's output before it was turned into that. Where micro-batches
    add up, the shards stay, and a new one comes beside them before it is added.
    """
    fsdp, size, stored = config.fsdp, dtypes(config).compute, stored_bytes(config)
    assert fsdp is not None
    if fsdp.version != 2 or fsdp.offload is not Offload.NONE:
        return []
    largest = max(parts.layer_gradient, parts.tail, parts.embedding) if config.lora is None else parts.layer_gradient
    new = gradient_elements(config, counts)
    if config.gradient_accumulation_steps > 1 and fsdp.reduce_each_micro_batch:
        new = largest // size
    shards = stored * ceil_div(new, config.shard_ranks)
    output = ceil_div(largest, config.shard_ranks) if stored != size else 0
    return [
        cached_entry(
            "reduction-stream",
            Account.GRADIENTS,
            shards + output,
            frozenset({Moment.FORWARD, Moment.LOSS}) | _FIRST,
            f"{shards} B of {'gradient shards' if new > largest // size else 'the largest shard before it is added'} + "
            f"{output} B of the largest output of a reduction",
            "torch distributed/fsdp/_fully_shard/_fsdp_collectives.py foreach_reduce; CUDACachingAllocator.cpp",
        )
    ]


def fsdp_head_entries(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> list[Entry]:
    """Returns the head's all-gather buffer, as far as it is more than what backward of the loss holds instead.

    And what the largest of those buffers leaves in the gathering stream's memory, which serves no other.

    In forward of the loss the buffer that the head was copied out of is alive beside the head: nothing is gathered
    after it that would let it go. The loss is booked at its largest instant, which is in backward: logits and their
    gradients in fp32, or the tiles and the gradient of the hidden states, and the gradient of a head that trains. A
    head that shares the embedding's tensor was gathered long before.
    """
    if config.fsdp is None or config.fsdp.version != 2:
        return []
    parts, tokens, vocab = units(model, config), config.micro_batch_tokens, model.vocab_size
    tail, largest = parts.tail, max(parts.tail, parts.embedding)
    casts = config.lora is None and stored_bytes(config) != dtypes(config).compute
    left = largest + (ceil_div(largest, config.shard_ranks) if casts else 0)
    if model.tied:
        return [_gather_stream(left, frozenset({Moment.LOSS})), _gather_stream(left, BACKWARD | {Moment.STEP})]
    held = 12 * vocab * tokens
    if config.loss is LossHead.CHUNKED:
        rows, columns = min(tokens, facts.loss_tile_tokens), min(vocab, facts.loss_tile_vocab)
        held = 6 * model.hidden_size * tokens + 2 * rows * columns
    held += tail if config.lora is None else 0
    return [
        _gather_stream(left - max(0, tail - held), frozenset({Moment.LOSS})),
        _gather_stream(left, BACKWARD | {Moment.STEP}),
        gpu_entry(
            "head-all-gather-buffer",
            Account.WORKSPACE,
            max(0, tail - held),
            frozenset({Moment.LOSS}),
            f"{tail} B of final norm and head, less {held} B that the loss holds in backward only",
            _GROUP,
        ),
    ]


def _gather_stream(size_bytes: int, moments: frozenset[Moment]) -> Entry:
    """Returns what all-gather buffers outside the layers leave in the memory of their stream."""
    return cached_entry(
        "gather-stream" if Moment.LOSS in moments else "gather-stream-after-loss",
        Account.WORKSPACE,
        size_bytes,
        moments,
        f"{size_bytes} B of the largest all-gather buffer outside the layers and of this rank's part in its type: "
        "memory that serves its stream alone",
        f"{_GROUP} get_all_gather_streams, _fsdp_collectives.py foreach_all_gather; torch CUDACachingAllocator.cpp",
    )


def gradient_elements(config: TrainingConfig, counts: ParamCounts) -> int:
    """Returns the elements of all gradients: a flat parameter that mixes frozen and trained weights has one for each.

    Source: torch distributed/fsdp/_flat_param.py: the gradient of an unsharded flat parameter, of which frozen weights
        are views like the others.
    """
    assert config.fsdp is not None
    return counts.total + counts.adapters if _mixes(config) else counts.trainable


def _mixes(config: TrainingConfig) -> bool:
    return config.lora is not None and config.fsdp is not None and config.fsdp.version == 1 and config.fsdp.mixed_units


def _gradient_shards(config: TrainingConfig, counts: ParamCounts, *, kept: bool, reduced: bool) -> list[Entry]:
    """Returns this rank's reduced gradients, as backward leaves them.

    Args:
        config: The configuration.
        counts: Its elements.
        kept: Whether micro-batches add up in them.
        reduced: Whether every micro-batch leaves them; otherwise only the last, as it frees the whole gradients.
    """
    stored, ranks = stored_bytes(config), config.shard_ranks
    stays = TRAINING if kept else frozenset({Moment.STEP})
    middle = gradient_elements(config, counts) - counts.head - counts.embedding
    rows = (
        ("gradient-shards-head", counts.head, BACKWARD, "from the first layer of backward on"),
        ("gradient-shards-layers", middle, _LAST | _EMBEDDING, "complete at the last layer of backward"),
        ("gradient-shards-embedding", counts.embedding, frozenset[Moment](), "once nothing of the embedding is whole"),
    )
    return [
        gpu_entry(
            name,
            Account.GRADIENTS,
            stored * ceil_div(elements, ranks),
            stays | (moments if reduced else frozenset()),
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
