"""Parameters, master weights, gradients and optimizer states: the static part of the bill."""

from __future__ import annotations

from dataclasses import dataclass

from memc.config import Engine, LossHead, Method, Offload, Optimizer, Quantization, Task, TrainingConfig
from memc.facts.records import Component, Linear, ModelFacts, Norm, Sees, Tensor
from memc.ledger.constants import LedgerFacts
from memc.ledger.dtypes import Dtypes, dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.image_shapes import idle_adapters, idle_params, lowest_block, running
from memc.ledger.parts import AFTER_LOAD, ALWAYS, BACKWARD, TRAINING, gpu_entry
from memc.units import ceil_div

_TORCH = "torch.optim, torch.autograd"

COPYING_OPTIMIZERS = frozenset({Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT, Optimizer.PAGED_ADAMW})
"""Those of bitsandbytes: what their load_state_dict is given is copied before it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamCounts:
    """Elements by what happens to them.

    Attributes:
        total: Base model.
        quantized: Base elements that become 4-bit; 0 unless the method is qlora.
        quantized_rows: Inputs of those linears, over all of them.
        adapters: LoRA elements.
        trainable: Elements with a gradient.
        head: Trainable elements of the output head whose gradient comes first (none of a tied or frozen matrix), with
            the linears and norms before it.
        embedding: Trainable elements whose gradient comes last: the input embedding (the shared tensor when tied).
        lowest_layer: Trainable elements of the layer next to the embedding.
        tied_head: Elements of the head's gradient when it shares the embedding's tensor and trains, else 0.
        small_state: Trainable elements in tensors below the 8-bit optimizer's minimum, and embeddings, which
            transformers keeps at 32 bits.
        layer_linears: Elements of all linears in the blocks.
        largest_tensor: Elements of the largest trainable tensor.
        largest_module: Elements of the largest module that ZeRO-3 gathers at once: a linear, the embedding, the head,
            or all experts of a layer, which are a leaf.
        embedded_above: Whether a whole stack lies below the input embedding, so that its backward is still to come when
            the embedding's gradient is complete.
        below: Trainable elements of modules between the input embedding and the layers, whose gradient comes last too.
    """

    total: int
    quantized: int
    quantized_rows: int
    adapters: int
    trainable: int
    head: int
    embedding: int
    lowest_layer: int
    tied_head: int
    small_state: int
    layer_linears: int
    largest_tensor: int
    largest_module: int
    below: int = 0
    embedded_above: bool = False


def count_params(model: ModelFacts, config: TrainingConfig, facts: LedgerFacts) -> ParamCounts:
    """Returns the element counts of a model under a method."""
    seen = running(model, config)
    idle, lowest = idle_params(model, config), lowest_block(seen)
    linears = _block_linears(model)
    norms = [(norm, group.count) for group in model.groups for norm in group.block.norms]
    layer_linears = sum(linear.weight_params * count for linear, count in linears)
    modules = [linear.params for linear, _ in linears] + [model.embedding_params, model.head_params]
    modules += [group.block.routing_params for group in model.groups]
    if config.lora is None:
        biases = [(linear.out_features, count) for linear, count in linears if linear.bias]
        vectors = biases + [(norm.params, count) for norm, count in norms] + [(model.final_norm.params, 1)]
        small = sum(size * count for size, count in vectors if size < facts.adam8bit_min_params)
        tensors = [linear.weight_params for linear, _ in linears] + [model.embedding_params, model.head_params]
        return ParamCounts(
            total=model.total_params,
            quantized=0,
            quantized_rows=0,
            adapters=0,
            trainable=model.total_params - idle,
            head=model.head_params + _tail_params(model),
            embedding=model.embedding_params,
            lowest_layer=lowest.params,
            tied_head=model.vocab_size * _embedding_width(model) if model.tied else 0,
            small_state=small + model.embedding_params,
            layer_linears=layer_linears,
            largest_tensor=max(tensors),
            largest_module=max(modules),
            below=_params_below(model),
            embedded_above=model.stacks[0].sees is Sees.AUDIO,
        )
    rank, targets = config.lora.rank, frozenset(config.lora.target_modules)
    pairs = [
        (rank * side, count)
        for linear, count in linears
        if linear.name in targets and linear.adaptable
        for side in (linear.in_features, linear.out_features)
    ]
    saved = _saved_modules(model, config)
    embedding, head = _saved_vocabulary(model, config)
    saved += embedding + head
    adapters = sum(size * count for size, count in pairs) + saved
    quantized, rows = _quantized(model, config) if config.method is Method.QLORA else (0, 0)
    return ParamCounts(
        total=model.total_params,
        quantized=quantized,
        quantized_rows=rows,
        adapters=adapters,
        trainable=adapters - idle_adapters(model, config),
        head=head + _tail_adapters(model, rank, targets),
        embedding=embedding,
        lowest_layer=sum(
            rank * (linear.in_features + linear.out_features)
            for linear in lowest.linears
            if linear.name in targets and linear.adaptable
        ),
        tied_head=embedding if model.tied else 0,
        small_state=sum(size * count for size, count in pairs if size < facts.adam8bit_min_params) + embedding,
        layer_linears=layer_linears,
        largest_tensor=max([size for size, _ in pairs] + [saved]),
        largest_module=max(modules),
    )


def _embedding_width(model: ModelFacts) -> int:
    """Returns the columns of the head's matrix: those of the stream, or of an embedding that is projected to it."""
    return dict(model.tail_sizes).get("embedding_width", model.hidden_size)


def _in_tail(model: ModelFacts, module: Linear | Norm) -> bool:
    """Returns whether a module stands behind the layers, so that its gradient comes before theirs."""
    name = module.id if isinstance(module, Linear) else module.name
    return bool(name) and f"({name.replace('.', '_')}," in model.tail


def _tail_params(model: ModelFacts) -> int:
    """Returns the elements of linears and norms between the layers and the head."""
    modules: tuple[Linear | Norm, ...] = (*model.outer_linears, *model.outer_norms)
    return sum(module.params for module in modules if _in_tail(model, module))


def _params_below(model: ModelFacts) -> int:
    """Returns the elements of modules outside the layers of the main stack that do not stand behind them."""
    modules: tuple[Linear | Norm | Tensor, ...] = (*model.outer_linears, *model.outer_norms, *model.outer_tensors)
    below = [module for module in modules if isinstance(module, Tensor) or not _in_tail(model, module)]
    return sum(module.params for module in (*below, *model.embedding_norms))


def _tail_adapters(model: ModelFacts, rank: int, targets: frozenset[str]) -> int:
    """Returns the elements of adapters on linears between the layers and the head."""
    return sum(
        rank * (linear.in_features + linear.out_features)
        for linear in model.outer_linears
        if linear.name in targets and linear.adaptable and _in_tail(model, linear)
    )


def _saved_modules(model: ModelFacts, config: TrainingConfig) -> int:
    """Returns the elements of modules outside the blocks that train whole beside adapters, as copies of frozen ones.

    Source: peft utils/other.py ModulesToSaveWrapper: the original stays, a deep copy trains.
    """
    assert config.lora is not None
    if config.task is not Task.CLASSIFICATION or not config.lora.modules_to_save:
        return 0
    kept = {norm.name for norm in model.outer_norms if norm.name.partition(".")[0] not in config.lora.modules_to_save}
    norms = sum(norm.params for norm in model.outer_norms if norm.name not in kept)
    return norms + sum(linear.params for linear in model.outer_linears)


def _saved_vocabulary(model: ModelFacts, config: TrainingConfig) -> tuple[int, int]:
    """Returns the elements that train of the input embedding and of the head beside adapters: whole copies or new rows.

    Source: peft utils/other.py ModulesToSaveWrapper; tuners/trainable_tokens/layer.py (a row for each new token).
    """
    assert config.lora is not None
    rows = model.vocab_size * model.hidden_size
    embedding = rows if config.lora.trains_embedding else 0
    head = rows if config.lora.trains_head and not model.tied else 0
    new = config.lora.new_tokens * model.hidden_size
    return embedding + new, head + (0 if model.tied else new)


def _quantized(model: ModelFacts, config: TrainingConfig) -> tuple[int, int]:
    """Returns the elements of a base that are 4-bit, and the inputs of its 4-bit linears.

    Assumes: a GPTQ checkpoint holds experts as linears of their own, and so in 4 bits; fused experts, which
        transformers builds, are no linears.
    """
    linears = [(linear, count) for linear, count in _block_linears(model) if linear.quantized]
    elements = sum(linear.weight_params * count for linear, count in linears)
    rows = sum(linear.in_features * count for linear, count in linears)
    if config.quantization is Quantization.GPTQ:
        for group in model.groups:
            experts = [item.params for item in group.block.tensors if item.component is Component.EXPERTS]
            elements += sum(experts) * group.count
    return elements, rows


def _block_linears(model: ModelFacts) -> list[tuple[Linear, int]]:
    return list(model.linear_modules())


def nf4_bytes(params: int, double: bool, facts: LedgerFacts) -> int:
    """Returns the bytes of `params` 4-bit elements with their quantisation constants.

    Source: bitsandbytes functional.py, quantize_4bit: one fp32 constant per block, itself 8-bit with one fp32 constant
        per nested block under double quantisation.
    """
    constants = ceil_div(params, facts.nf4_block_params)
    if not double:
        return ceil_div(params, 2) + 4 * constants
    return ceil_div(params, 2) + constants + 4 * ceil_div(constants, facts.nf4_nested_block_params)


def gptq_bytes(params: int, rows: int, facts: LedgerFacts) -> int:
    """Returns the bytes of `params` elements in GPTQ's packing, over linears with `rows` inputs together.

    Source: AutoGPTQ qlinear: int32 words of eight 4-bit codes; for each group of inputs a 16-bit scale and a 4-bit zero
        of every output; the group of every input as int32.
    """
    groups = ceil_div(params, facts.gptq_group_rows)
    return ceil_div(params, 2) + 2 * groups + ceil_div(groups, 2) + 4 * rows


def quantized_bytes(config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> tuple[int, str, str]:
    """Returns the bytes of a 4-bit base's linears, how they come about, and the source."""
    if config.quantization is Quantization.GPTQ:
        size = gptq_bytes(counts.quantized, counts.quantized_rows, facts)
        return size, f"{counts.quantized} elements as GPTQ with group constants", "AutoGPTQ qlinear_tritonv2.py"
    size = nf4_bytes(counts.quantized, config.double_quantization, facts)
    nested = ", double quantisation" if config.double_quantization else ""
    return size, f"{counts.quantized} elements as NF4 with block constants{nested}", "bitsandbytes functional.py"


def parameter_entries(config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> list[Entry]:
    """Returns the base weights and adapters on one GPU.

    Source: sizes of the loaded tensors; ZeRO-3 keeps 1/N of each and gathers modules on use.
    """
    types, zero = dtypes(config), config.zero
    shards = config.world_size if zero is not None and zero.stage == 3 else 1
    on_gpu = zero is None or zero.offload_param is Offload.NONE
    moments = ALWAYS
    if config.method is Method.QLORA:
        packed, text, source = quantized_bytes(config, counts, facts)
        rest = counts.total - counts.quantized
        size = types.weight
        entries = [
            gpu_entry(
                "base-weights-4bit",
                Account.PARAMETERS,
                packed,
                moments,
                text,
                source,
            ),
            gpu_entry(
                "base-weights-unquantized",
                Account.PARAMETERS,
                size * rest,
                moments,
                f"{size} B x {rest} elements of embedding, head, norms, biases",
                "transformers BitsAndBytesConfig: linears outside the head are quantised",
            ),
        ]
    else:
        share = ceil_div(counts.total, shards)
        entries = [
            gpu_entry(
                "weights" if config.method is Method.FULL else "base-weights",
                Account.PARAMETERS,
                types.weight * share if on_gpu else 0,
                moments,
                f"{types.weight} B x {counts.total} elements" + (f" / {shards} ranks" if shards > 1 else ""),
                "transformers from_pretrained(dtype)",
            )
        ]
    share = ceil_div(counts.adapters, shards)
    entries.append(
        gpu_entry(
            "adapters",
            Account.PARAMETERS,
            types.adapter * share if on_gpu else 0,
            moments,
            f"{types.adapter} B x {counts.adapters} elements" + (f" / {shards} ranks" if shards > 1 else ""),
            "peft LoraLayer",
        )
    )
    if zero is not None and zero.stage == 3 and not zero.partitioned_at_load:
        entries.append(
            gpu_entry(
                "weights-before-partitioning",
                Account.PARAMETERS,
                types.weight * (counts.total - ceil_div(counts.total, shards)),
                frozenset({Moment.LOAD}),
                f"{types.weight} B x {counts.total} elements, whole on every GPU, less the shard",
                "DeepSpeed engine.py _configure_distributed_model",
            )
        )
    if zero is not None and zero.hpz_partition > 1:
        second = ceil_div(counts.total + counts.adapters, zero.hpz_partition)
        entries.append(
            gpu_entry(
                "second-copy-shards",
                Account.PARAMETERS,
                2 * second if on_gpu else 0,
                AFTER_LOAD,
                f"2 B x {counts.total + counts.adapters} elements / {zero.hpz_partition} ranks of one node",
                "DeepSpeed partition_parameters.py ds_secondary_tensor",
            )
        )
    return entries


def state_entries(config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> list[Entry]:
    """Returns master weights, gradients, optimizer states and the transients of the step on one GPU.

    Those of DeepSpeed stand in `zero`, but for the head's share of a shared tensor's gradient.
    """
    types = dtypes(config)
    tied = _tied_head_gradient(config, counts, types)
    if config.engine is Engine.DEEPSPEED:
        return tied
    return [*tied, *_plain_gradients(config, counts, types), *_plain_optimizer(config, counts, types, facts)]


def _tied_head_gradient(config: TrainingConfig, counts: ParamCounts, types: Dtypes) -> list[Entry]:
    """Returns the head's share of a shared tensor's gradient, which waits until the embedding's share joins it.

    Source: torch autograd engine input buffers: the sum is made when both shares exist, in place unless the head's
        share is a view (the plain loss without autocast).
    """
    size, out_of_place = types.gradient * counts.tied_head, config.loss is LossHead.PLAIN and not types.autocast
    return [
        gpu_entry(
            "tied-head-gradient",
            Account.GRADIENTS,
            size,
            BACKWARD - {Moment.BACKWARD_EMBEDDING} if counts.embedded_above else BACKWARD,
            f"{types.gradient} B x {counts.tied_head} elements of the head, waiting for the embedding's",
            "torch autograd input_buffer.cpp",
        ),
        gpu_entry(
            "tied-gradient-sum",
            Account.GRADIENTS,
            size if out_of_place else 0,
            frozenset({Moment.BACKWARD_EMBEDDING}),
            f"{types.gradient} B x {counts.tied_head} elements: the sum of both shares",
            "torch autograd input_buffer.cpp",
        ),
    ]


def _plain_gradients(config: TrainingConfig, counts: ParamCounts, types: Dtypes) -> list[Entry]:
    """Returns gradients of the single-process and DistributedDataParallel engines."""
    size, source = types.gradient, "torch.autograd; Trainer zeroes gradients to None after the step"
    ddp = config.engine is Engine.DDP
    if ddp:
        buckets = gpu_entry(
            "ddp-buckets",
            Account.GRADIENTS if config.gradient_as_bucket_view else Account.WORKSPACE,
            size * counts.trainable,
            ALWAYS,
            f"{size} B x {counts.trainable} trainable elements, kept for the whole run"
            + (", gradients are views of them" if config.gradient_as_bucket_view else ""),
            "torch DistributedDataParallel reducer",
        )
        if config.gradient_as_bucket_view and config.gradient_accumulation_steps == 1:
            return [buckets]
    stays = TRAINING if config.gradient_accumulation_steps > 1 else frozenset({Moment.STEP})
    if ddp and config.gradient_as_bucket_view:  # made apart from the buckets in passes that do not reduce
        stays = stays - frozenset({Moment.STEP})
    layers = counts.trainable - counts.head - counts.embedding
    upper, last = layers - counts.lowest_layer - counts.below, counts.embedding + counts.below
    kept = " and, while accumulating, through the next forward" if config.gradient_accumulation_steps > 1 else ""
    entries = [
        gpu_entry(
            "gradients-head",
            Account.GRADIENTS,
            size * counts.head,
            stays | BACKWARD,
            f"{size} B x {counts.head} elements, from the first layer of backward on{kept}",
            source,
        ),
        gpu_entry(
            "gradients-layers",
            Account.GRADIENTS,
            size * upper,
            stays | {Moment.BACKWARD_LAST_LAYER, Moment.BACKWARD_EMBEDDING},
            f"{size} B x {upper} elements, complete before the last layer of backward{kept}",
            source,
        ),
        gpu_entry(
            "gradients-lowest-layer",
            Account.GRADIENTS,
            size * counts.lowest_layer,
            stays | {Moment.BACKWARD_EMBEDDING},
            f"{size} B x {counts.lowest_layer} elements of the layer next to the embedding{kept}",
            source,
        ),
        gpu_entry(
            "gradients-embedding",
            Account.GRADIENTS,
            size * last,
            stays | {Moment.BACKWARD_EMBEDDING},
            f"{size} B x {last} elements, after the last layer of backward{kept}",
            source,
        ),
    ]
    return [buckets, *entries] if ddp else entries


def adam_bytes(config: TrainingConfig, counts: ParamCounts, types: Dtypes, facts: LedgerFacts) -> tuple[int, str]:
    """Returns the bytes of both Adam moments of all trainable elements, and the formula.

    Source: torch.optim.AdamW (moments in the parameter's type); bitsandbytes optimizer.py (8-bit blocks);
        transformers Trainer (embeddings stay at 32 bits under 8-bit optimizers).
    """
    if config.optimizer is Optimizer.PAGED_ADAMW:
        return 8 * counts.trainable, f"2 moments x 4 B x {counts.trainable} elements"
    if config.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FOREACH):
        size = 2 * types.state
        return size * counts.trainable, f"2 moments x {types.state} B x {counts.trainable} elements"
    small = counts.small_state
    large = counts.trainable - small
    blocks = ceil_div(large, facts.adam8bit_block_params)
    return (
        8 * small + 2 * large + 8 * blocks,
        f"2 x 1 B x {large} elements + 2 x 4 B x {blocks} block constants + 8 B x {small} elements at 32 bits",
    )


def _block_constant_bytes(counts: ParamCounts, facts: LedgerFacts) -> int:
    """Returns the bytes of the constants of both 8-bit moments: one in fp32 for each block."""
    return 8 * ceil_div(counts.trainable - counts.small_state, facts.adam8bit_block_params)


def _plain_optimizer(config: TrainingConfig, counts: ParamCounts, types: Dtypes, facts: LedgerFacts) -> list[Entry]:
    """Returns Adam states and step transients without DeepSpeed."""
    size, formula = adam_bytes(config, counts, types, facts)
    paged = config.optimizer in (Optimizer.PAGED_ADAMW_8BIT, Optimizer.PAGED_ADAMW)
    entries = [
        gpu_entry(
            "adam-moments",
            Account.OPTIMIZER_STATES,
            0 if paged else size,
            AFTER_LOAD,
            formula,
            "torch.optim.AdamW" if config.optimizer is Optimizer.ADAMW else "bitsandbytes optimizer.py",
        )
    ]
    if config.optimizer is Optimizer.PAGED_ADAMW_8BIT:
        constants = _block_constant_bytes(counts, facts)
        entries.append(
            gpu_entry(
                "adam-block-constants",
                Account.OPTIMIZER_STATES,
                constants,
                AFTER_LOAD,
                f"{constants} B of fp32 constants of 8-bit blocks, which are not paged",
                "bitsandbytes optimizer.py Optimizer2State.init_state, absmax1 and absmax2",
            )
        )
    if config.optimizer in COPYING_OPTIMIZERS and config.world_size > 1:
        read = 2 * size if paged else size
        entries.append(
            gpu_entry(
                "moments-being-read",
                Account.OPTIMIZER_STATES,
                read,
                frozenset({Moment.RESUME}),
                f"{read} B: the moments as read, which load_state_dict copies" + (", no longer paged" if paged else ""),
                "transformers trainer.py _load_optimizer_and_scheduler; bitsandbytes optimizer.py load_state_dict",
            )
        )
    if config.optimizer is Optimizer.ADAMW_FOREACH:
        entries.append(
            gpu_entry(
                "foreach-temporaries",
                Account.WORKSPACE,
                types.state * counts.trainable,
                frozenset({Moment.STEP}),
                f"one temporary list: {types.state} B x {counts.trainable} elements",
                "torch.optim adam.py _multi_tensor_adam",
            )
        )
    return entries
