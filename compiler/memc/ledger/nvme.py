"""State that DeepSpeed moves to an NVMe drive under ZeRO-3: what lies on the drive, and the host buffers it takes."""

from __future__ import annotations

from memc.config import Offload, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.entries import Account, Entry, Moment, Resource
from memc.ledger.parts import AFTER_LOAD, ALWAYS, host_entry
from memc.ledger.states import ParamCounts
from memc.units import ceil_div, next_power_of_two

_PARAMS = "deepspeed runtime/swap_tensor/partitioned_param_swapper.py"
_STATES = "deepspeed runtime/swap_tensor/optimizer_utils.py, partitioned_optimizer_swapper.py"


def nvme_entries(config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns entries of the drive and of host memory of one node; none unless something goes to NVMe."""
    zero = config.zero
    if zero is None:
        return []
    entries: list[Entry] = []
    if zero.offload_optimizer is Offload.NVME:
        entries += _states(config, counts)
    if zero.offload_param is Offload.NVME:
        entries += _parameters(config, counts)
    return entries


def _drive_entry(name: str, account: Account, size_bytes: int, formula: str, source: str) -> Entry:
    return Entry(
        name=name,
        account=account,
        resource=Resource.NVME,
        bytes=size_bytes,
        moments=AFTER_LOAD,
        formula=formula,
        source=source,
    )


def _states(config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns masters, moments and gradients of each sub-group as files, and the host buffers of one sub-group.

    Each buffer holds one tensor of the largest sub-group in the masters' type. Gradients of all sub-groups also wait in
    one pinned 16-bit buffer between backward and the step.
    """
    zero, ranks = config.zero, config.gpus_per_node
    assert zero is not None
    share = ceil_div(counts.trainable, config.world_size)
    unit = min(share, zero.sub_group_elements)
    master, state = zero.master_bytes, zero.moment_bytes
    pinned = next_power_of_two(2 * share)
    return [
        _drive_entry(
            "nvme-master-weights",
            Account.MASTER_WEIGHTS,
            ranks * master * share,
            f"{ranks} ranks x {master} B x {share} elements",
            _STATES,
        ),
        _drive_entry(
            "nvme-adam-moments",
            Account.OPTIMIZER_STATES,
            ranks * 2 * state * share,
            f"{ranks} ranks x 2 moments x {state} B x {share} elements",
            _STATES,
        ),
        _drive_entry(
            "nvme-gradients",
            Account.GRADIENTS,
            ranks * master * share,
            f"{ranks} ranks x {master} B x {share} elements",
            _STATES,
        ),
        host_entry(
            "nvme-state-buffers",
            Account.WORKSPACE,
            ranks * zero.nvme_state_buffers * master * unit,
            AFTER_LOAD,
            f"{ranks} ranks x {zero.nvme_state_buffers} buffers x {master} B x {unit} elements of a sub-group, pinned",
            _STATES,
        ),
        host_entry(
            "gradients-before-step",
            Account.GRADIENTS,
            ranks * pinned,
            AFTER_LOAD,
            f"{ranks} ranks x 2 B x {share} elements, pinned: rounded up to {pinned} B",
            "deepspeed runtime/zero/stage3.py grad_partitions_flat_buffer",
        ),
    ]


def _parameters(config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns 16-bit shards on the drive, those that stay in host memory, and the buffers between the two.

    All buffers of a rank are one locked block. What a step has updated passes through a further block as large as the
    largest sub-group's shards, where some sub-group lies on the drive.
    """
    zero, ranks = config.zero, config.gpus_per_node
    assert zero is not None
    share = ceil_div(counts.total + counts.adapters, config.world_size)
    resident = min(share, zero.nvme_resident_elements)
    away = share - resident
    pinned = next_power_of_two(2 * resident)
    buffers = 2 * zero.nvme_buffers * zero.nvme_buffer_elements
    unit = min(share, zero.sub_group_elements) if away else 0
    return [
        _drive_entry(
            "nvme-parameters",
            Account.PARAMETERS,
            ranks * 2 * share,
            f"{ranks} ranks x 2 B x {share} elements; each shard is written once when it is cut",
            _PARAMS,
        ),
        host_entry(
            "nvme-resident-parameters",
            Account.PARAMETERS,
            ranks * pinned,
            ALWAYS,
            f"{ranks} ranks x 2 B x {resident} elements (max_in_cpu), pinned: rounded up to {pinned} B",
            "deepspeed runtime/zero/stage3.py _create_param_groups_fp16_flat_cpu_memory",
        ),
        host_entry(
            "nvme-parameter-buffers",
            Account.WORKSPACE,
            ranks * buffers,
            ALWAYS,
            f"{ranks} ranks x {zero.nvme_buffers} buffers x 2 B x {zero.nvme_buffer_elements} elements, locked",
            _PARAMS,
        ),
        host_entry(
            "nvme-parameter-updates",
            Account.WORKSPACE,
            ranks * 2 * unit,
            ALWAYS - {Moment.LOAD},
            f"{ranks} ranks x 2 B x {unit} elements of the largest sub-group, locked",
            "deepspeed partitioned_param_swapper.py reserve_partitioned_swap_space",
        ),
    ]


def checkpoint_host_entries(model: ModelFacts, config: TrainingConfig, stream_bytes: int) -> list[Entry]:
    """Returns the inputs of checkpointed layers that wait in pinned host memory.

    Args:
        model: Facts of the model.
        config: The configuration.
        stream_bytes: Bytes per element of the residual stream.
    """
    if not config.checkpoint_offload or not config.checkpoint_every:
        return []
    layers = ceil_div(model.num_layers, config.checkpoint_every)
    size = stream_bytes * model.hidden_size * config.micro_batch_tokens
    pinned, ranks = next_power_of_two(size), config.gpus_per_node
    return [
        host_entry(
            "offloaded-checkpoints",
            Account.ACTIVATIONS,
            ranks * layers * pinned,
            AFTER_LOAD,
            f"{ranks} ranks x {layers} layers x {stream_bytes} B x hidden {model.hidden_size} x "
            f"{config.micro_batch_tokens} tokens, pinned: {size} B round up to {pinned} B",
            "transformers modeling_utils.py save_on_cpu; torch CachingHostAllocator",
        )
    ]
