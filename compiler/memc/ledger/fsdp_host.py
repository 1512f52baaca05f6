"""Host memory of one node under FSDP: loading on rank 0, offloaded shards, checkpoints written and read."""

from __future__ import annotations

from memc.config import Method, Offload, Precision, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.constants import LedgerFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.fsdp import largest_tensor
from memc.ledger.fsdp_units import stored_bytes
from memc.ledger.parts import AFTER_LOAD, ALWAYS, host_entry
from memc.ledger.states import ParamCounts, quantized_bytes
from memc.units import ceil_div

_OFFLOAD = "torch distributed/fsdp/_fully_shard/_fsdp_param.py CPUOffloadPolicy"
_READ = "transformers modeling_utils.py from_pretrained under FSDP"
_TYPES = {Precision.BF16: "bfloat16", Precision.BF16_PURE: "bfloat16", Precision.FP16: "float16"}
_SAVE = "accelerate utils/fsdp_utils.py save_fsdp_model, save_fsdp_optimizer"


def fsdp_host_entries(
    model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts
) -> list[Entry]:
    """Returns host entries of one node."""
    assert config.fsdp is not None
    ranks = config.gpus_per_node
    entries = [
        host_entry(
            "training-processes",
            Account.WORKSPACE,
            ranks * facts.process_host_bytes,
            ALWAYS,
            f"{ranks} ranks x {facts.process_host_bytes} B resident before anything is loaded",
            "specs/libraries/process.yaml",
        ),
        _load_quantized(model, config, counts, facts) if config.method is Method.QLORA else _load(config, counts),
    ]
    if config.fsdp.offload is Offload.CPU:
        entries += _offloaded(config, counts)
    return [*entries, *_checkpoints(config, counts, facts)]


def _load(config: TrainingConfig, counts: ParamCounts) -> Entry:
    """Returns host memory while weights are loaded: rank 0 of the node reads them, the others hold none.

    Source: transformers integrations/fsdp.py and modeling_utils.py: with FSDP_CPU_RAM_EFFICIENT_LOADING only the first
        process of a node loads.
    """
    assert config.fsdp is not None
    size = stored_bytes(config) if config.lora is None else dtypes(config).weight
    readers = 1 if config.fsdp.efficient_loading else config.gpus_per_node
    text = f"{readers} ranks x {size} B x {counts.total} elements"
    total = readers * size * counts.total
    return host_entry("checkpoint-in-memory", Account.PARAMETERS, total, frozenset({Moment.LOAD}), text, _READ)


def _load_quantized(model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> Entry:
    """Returns what ranks hold in host memory until FSDP has cut a base that becomes 4-bit.

    What is quantised as its layer is cut are pages of the checkpoint until then, which all ranks share and the system
    takes back. If the checkpoint has another type, these weights are copies, which wait in 4 bits. What stays in 16
    bits may be a copy too: transformers merges experts, for instance. Adapters are made beside their layers.

    Source: templates/train quantized_layer_by_layer; transformers core_model_loading.py _materialize_copy, whose copy
        of what a file holds is a view of the file where device and type are the same.
    """
    largest, ranks = largest_tensor(model), config.gpus_per_node
    each, text = 2 * largest, f"2 B x {largest} elements of the largest tensor"
    if config.quantizes_layer_by_layer:
        size, rest, stored = dtypes(config).weight, counts.total - counts.quantized, stored_bytes(config)
        each += size * rest + stored * counts.adapters
        text += f" + {size} B x {rest} elements that stay unquantised + {stored} B x {counts.adapters} of adapters"
        if model.checkpoint_dtype != _TYPES.get(config.precision, "float32"):
            packed = quantized_bytes(config, counts, facts)[0]
            each += packed
            text += f" + {packed} B of 4-bit copies of {model.checkpoint_dtype} weights"
    name = "checkpoint-in-memory"
    return host_entry(
        name, Account.PARAMETERS, ranks * each, frozenset({Moment.LOAD}), f"{ranks} ranks x ({text})", _READ
    )


def _offloaded(config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns shards, gradients and moments that FSDP keeps in host memory.

    Shards and gradients are pinned tensor by tensor, and a pinned block rounds up to a power of two: on average over
    sizes that are not powers of two by a third (the mean of 2 to the ceiling over the size is 1/ln 2 = 1.44, 1 at
    best, 2 at worst), which is given as an uncertainty rather than added.
    """
    ranks, spread, stored = config.gpus_per_node, config.shard_ranks, stored_bytes(config)
    base = stored if config.lora is None else dtypes(config).weight
    share, trainable = ceil_div(counts.total, spread), ceil_div(counts.trainable, spread)
    weights = base * share + stored * ceil_div(counts.adapters, spread)
    return [
        host_entry(
            "offloaded-shards",
            Account.PARAMETERS,
            ranks * weights,
            ALWAYS,
            f"{ranks} ranks x {weights} B of shards, pinned one by one",
            _OFFLOAD,
        ),
        host_entry(
            "offloaded-gradient-shards",
            Account.GRADIENTS,
            ranks * stored * trainable,
            AFTER_LOAD,
            f"{ranks} ranks x {stored} B x {trainable} elements, pinned one by one",
            _OFFLOAD,
        ),
        host_entry(
            "offloaded-adam-moments",
            Account.OPTIMIZER_STATES,
            ranks * 2 * stored * trainable,
            AFTER_LOAD,
            f"{ranks} ranks x 2 moments x {stored} B x {trainable} elements",
            "torch.optim.AdamW on DTensor shards",
        ),
    ]


def _checkpoints(config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> list[Entry]:
    """Returns what the node holds while it writes a checkpoint or reads one, and rank 0 at the end of the run.

    Sharded checkpoints stage every rank's own shards; whole ones gather tensors and states on rank 0. Weights are let
    go of before states are taken up, and frozen ones are not part of it. The model at the end of the run is gathered
    whole either way, with its frozen weights, though adapters alone are written.

    Source: accelerate utils/fsdp_utils.py, accelerator.py get_state_dict; transformers distributed/fsdp.py
        get_fsdp_ckpt_kwargs (adapters alone).
    """
    assert config.fsdp is not None
    ranks, spread, stored = config.gpus_per_node, config.shard_ranks, stored_bytes(config)
    saved = counts.total if config.lora is None else counts.adapters
    whole = stored * saved + (0 if config.lora is None else _frozen_bytes(config, counts, facts))
    if config.fsdp.sharded_checkpoints:
        weights, moments = (ranks * stored * ceil_div(count, spread) for count in (saved, 2 * counts.trainable))
        text = f"{ranks} ranks' shards, weights or moments, whichever are more"
    else:
        weights, moments = stored * saved, 2 * stored * counts.trainable
        text = "whole weights or moments of what trains, whichever are more, on rank 0"
    staged = max(weights, moments)
    at_the_end = "the whole model on rank 0 at the end of the run"
    return [
        host_entry(
            "state-being-saved",
            Account.PARAMETERS,
            max(staged, whole),
            frozenset({Moment.SAVE}),
            f"{max(staged, whole)} B: {text if staged >= whole else at_the_end}",
            _SAVE,
        ),
        host_entry(
            "state-being-read",
            Account.OPTIMIZER_STATES,
            staged,
            frozenset({Moment.RESUME}),
            f"{staged} B: {text}",
            "accelerate utils/fsdp_utils.py load_fsdp_model, load_fsdp_optimizer",
        ),
    ]


def _frozen_bytes(config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> int:
    """Returns the bytes of a frozen base."""
    packed = quantized_bytes(config, counts, facts)[0] if config.method is Method.QLORA else 0
    return packed + dtypes(config).weight * (counts.total - counts.quantized)
