"""Host memory of one node: loading, offloaded states, pinned buffers. All ranks of the node together."""

from __future__ import annotations

from memc.config import Engine, Method, Offload, Optimizer, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.checkpoints import checkpoint_entries
from memc.ledger.constants import LedgerFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.partitions import sub_groups, trained_matrices
from memc.ledger.parts import AFTER_LOAD, ALWAYS, host_entry
from memc.ledger.states import ParamCounts, adam_bytes
from memc.ledger.zero import flattened_on_gpu
from memc.units import ceil_div, next_power_of_two

_LOAD = frozenset({Moment.LOAD})


def host_entries(model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> list[Entry]:
    """Returns host entries of one node."""
    ranks, types = config.gpus_per_node, dtypes(config)
    entries = [
        host_entry(
            "training-processes",
            Account.WORKSPACE,
            ranks * facts.process_host_bytes,
            ALWAYS,
            f"{ranks} ranks x {facts.process_host_bytes} B resident before anything is loaded",
            "specs/libraries/stack.yaml",
        )
    ]
    entries += _load(model, config, counts)
    if config.zero_stage in (1, 2) and not flattened_on_gpu(config, counts, types, facts):
        size = types.gradient * counts.trainable
        more = max(0, 2 * size - types.weight * counts.total)
        entries.append(
            host_entry(
                "flattening-on-host",
                Account.PARAMETERS,
                ranks * more,
                _LOAD,
                f"{ranks} ranks x (2 x {size} B: what trains and its copy, less what was loaded), for want of room "
                "on the GPU",
                "DeepSpeed stage_1_and_2.py __init__, flatten_on_accelerator",
            )
        )
    if config.zero is not None and config.zero.offload_optimizer is Offload.CPU:
        entries += _offloaded_optimizer(model, config, counts)
    if config.zero is not None and config.zero.offload_param is Offload.CPU:
        share = ceil_div(counts.total, config.world_size)
        pinned = next_power_of_two(2 * share)
        entries.append(
            host_entry(
                "offloaded-parameters",
                Account.PARAMETERS,
                ranks * pinned,
                ALWAYS,
                f"{ranks} ranks x 2 B x {share} elements, pinned: rounded up to {pinned} B",
                "DeepSpeed stage3.py param_groups_fp16_flat_cpu_memory; torch CachingHostAllocator",
            )
        )
        alone = _pinned_alone_bytes(model, config.world_size)
        entries.append(
            host_entry(
                "parameters-before-flattening",
                Account.PARAMETERS,
                ranks * alone,
                ALWAYS,
                f"{ranks} ranks x {alone} B of shards that were pinned one by one as they were cut, each rounded up to "
                "a power of two, and stay with the allocator",
                "DeepSpeed partition_parameters.py _partition_param; torch CachingHostAllocator",
            )
        )
    if config.optimizer in (Optimizer.PAGED_ADAMW_8BIT, Optimizer.PAGED_ADAMW):
        size, formula = adam_bytes(config, counts, types, facts)
        entries.append(
            host_entry(
                "paged-adam-moments",
                Account.OPTIMIZER_STATES,
                ranks * size,
                AFTER_LOAD,
                f"{ranks} ranks x ({formula}) in managed memory that moves to the GPU on use",
                "bitsandbytes optimizer.py get_paged",
            )
        )
    return [*entries, *checkpoint_entries(model, config, counts, facts)]


def _load(model: ModelFacts, config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns host memory while weights are loaded.

    Assumes: from_pretrained builds the model on the CPU of every rank, except with a 4-bit base, which is quantised
        on the GPU tensor by tensor. Under ZeRO-3 rank 0 reads the checkpoint and the others receive their shards.
        Tensors that keep the type they have in the file stay pages of it, which the node's ranks share and the kernel
        may drop: the processes' resident sizes add up to this, the memory taken for good can be less.
    """
    types, ranks = dtypes(config), config.gpus_per_node
    if config.method is Method.QLORA:
        largest = max(
            [linear.weight_params for group in model.groups for linear in group.block.linears]
            + [model.embedding_params]
        )
        size, text = ranks * 2 * largest, f"{ranks} ranks x 2 B x {largest} elements of the largest tensor"
    elif config.zero is not None and config.zero.stage == 3 and config.zero.partitioned_at_load:
        size = types.weight * counts.total
        text = f"{types.weight} B x {counts.total} elements: rank 0 reads the checkpoint, the others get their shards"
    else:
        size = ranks * types.weight * counts.total
        text = f"{ranks} ranks x {types.weight} B x {counts.total} elements: every rank reads the whole checkpoint"
    return [host_entry("checkpoint-in-memory", Account.PARAMETERS, size, _LOAD, text, "transformers from_pretrained")]


def _pinned_alone_bytes(model: ModelFacts, ranks: int) -> int:
    """Returns what 16-bit shards of all matrices take of one rank's host when each is pinned by itself."""
    sizes = [(linear.weight_params, count) for linear, count in model.linear_modules()]
    sizes += [(one.params, group.count) for group in model.groups for one in group.block.tensors]
    sizes += [(model.embedding_params, 1), (model.head_params, 1)]
    return sum(count * next_power_of_two(2 * ceil_div(size, ranks)) for size, count in sizes)


def _offloaded_optimizer(model: ModelFacts, config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns masters, moments and gradient buffers that DeepSpeed keeps in host memory."""
    assert config.zero is not None and config.engine is Engine.DEEPSPEED
    ranks = config.gpus_per_node
    share = ceil_div(counts.trainable, config.world_size)
    stage3 = config.zero.stage == 3
    master_size, moment = config.zero.master_bytes, config.zero.moment_bytes
    groups: tuple[int, ...] = (share,)
    if stage3:
        groups = sub_groups(trained_matrices(model, config), config.world_size, config.zero.sub_group_elements)
    pinned_fp32 = sum(next_power_of_two(master_size * group) for group in groups)
    pinned_16bit = next_power_of_two(2 * share)
    master = master_size * share if stage3 else pinned_fp32
    source = "DeepSpeed stage3.py" if stage3 else "DeepSpeed stage_1_and_2.py"
    rounding = "pinned blocks round up to a power of two"
    return [
        host_entry(
            "offloaded-master-weights",
            Account.MASTER_WEIGHTS,
            ranks * master,
            AFTER_LOAD,
            f"{ranks} ranks x {master_size} B x {share} elements" + ("" if stage3 else f"; {rounding}: {master} B"),
            source,
        ),
        host_entry(
            "offloaded-adam-moments",
            Account.OPTIMIZER_STATES,
            ranks * 2 * moment * share,
            AFTER_LOAD,
            f"{ranks} ranks x 2 moments x {moment} B x {share} elements, not pinned",
            "DeepSpeed cpu_adam.py",
        ),
        host_entry(
            "offloaded-gradients",
            Account.GRADIENTS,
            ranks * pinned_fp32,
            AFTER_LOAD,
            f"{ranks} ranks x {master_size} B x {share} elements; {rounding}: {pinned_fp32} B",
            source,
        ),
        host_entry(
            "offload-16bit-buffer",
            Account.WORKSPACE,
            ranks * pinned_16bit,
            AFTER_LOAD,
            f"{ranks} ranks x 2 B x {share} elements; {rounding}: {pinned_16bit} B",
            source,
        ),
    ]
