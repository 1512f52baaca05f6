"""Host memory of one node under FSDP: loading on rank 0, offloaded shards, gathering whole tensors to save them."""

from __future__ import annotations

from memc.config import Method, Offload, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.constants import LedgerFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment
from memc.ledger.fsdp_units import stored_bytes
from memc.ledger.parts import AFTER_LOAD, ALWAYS, host_entry
from memc.ledger.states import ParamCounts
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
    return [*entries, *_save(config, counts)]


def _load(model: ModelFacts, config: TrainingConfig, counts: ParamCounts) -> Entry:
    """Returns host memory while weights are loaded: rank 0 of the node reads them, the others hold none.

    Source: transformers integrations/fsdp.py and modeling_utils.py: with FSDP_CPU_RAM_EFFICIENT_LOADING only the first
        process of a node loads. A 4-bit base is quantised on every GPU, tensor by tensor.
    """
    assert config.fsdp is not None
    size = stored_bytes(config) if config.lora is None else dtypes(config).weight
    if config.method is Method.QLORA:
        largest = max([counts.largest_module, model.embedding_params])
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


def _save(config: TrainingConfig, counts: ParamCounts) -> list[Entry]:
    """Returns what the node holds while it writes a checkpoint, and rank 0 at the end of the run.

    Sharded checkpoints stage every rank's own shards; whole ones gather tensors and states on rank 0. The model at the
    end of the run is whole either way.
    """
    assert config.fsdp is not None
    ranks, spread, stored = config.gpus_per_node, config.shard_ranks, stored_bytes(config)
    base = stored if config.lora is None else dtypes(config).weight
    whole = base * counts.total + stored * counts.adapters
    if config.lora is not None:
        whole = stored * counts.adapters
    if config.fsdp.sharded_checkpoints:
        staged = ranks * (base * ceil_div(counts.total, spread) + 2 * stored * ceil_div(counts.trainable, spread))
        text = f"{ranks} ranks' shards of weights and moments"
    else:
        staged = whole + 2 * stored * counts.trainable
        text = "whole weights and moments, gathered on rank 0"
    size = max(staged, whole)
    return [
        host_entry(
            "state-being-saved",
            Account.PARAMETERS,
            size,
            frozenset({Moment.SAVE}),
            f"{size} B: {text if staged >= whole else 'whole weights at the end of the run'}",
            _SAVE,
        )
    ]
