"""Host memory of one node under FSDP: loading on rank 0, offloaded shards, checkpoints written and read."""

from __future__ import annotations

from memc.config import Method, Offload, TrainingConfig
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
        _load(model, config, counts),
    ]
    if config.fsdp.offload is Offload.CPU:
        entries += _offloaded(config, counts)
    return [*entries, *_checkpoints(config, counts, facts)]


def _load(model: ModelFacts, config: TrainingConfig, counts: ParamCounts) -> Entry:
    """Returns host memory while weights are loaded: rank 0 of the node reads them, the others hold none.

    Source: transformers integrations/fsdp.py and modeling_utils.py: with FSDP_CPU_RAM_EFFICIENT_LOADING only the first
        process of a node loads. A 4-bit base is quantised on every GPU, tensor by tensor.
    """
    assert config.fsdp is not None
    size = stored_bytes(config) if config.lora is None else dtypes(config).weight
    if config.method is Method.QLORA:
        largest = largest_tensor(model)
        ranks = config.gpus_per_node
        total, text = ranks * 2 * largest, f"{ranks} ranks x 2 B x {largest} elements of the largest tensor"
    else:
        readers = 1 if config.fsdp.efficient_loading else config.gpus_per_node
        total = readers * size * counts.total
        text = f"{readers} ranks x {size} B x {counts.total} elements"
    source = "transformers modeling_utils.py from_pretrained under FSDP"
    return host_entry("checkpoint-in-memory", Account.PARAMETERS, total, frozenset({Moment.LOAD}), text, source)


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
