"""Host memory of one node while a checkpoint is written or read back, without FSDP."""

from __future__ import annotations

from memc.config import Engine, Method, Offload, TrainingConfig
from memc.facts.records import ModelFacts
from memc.ledger.constants import LedgerFacts
from memc.ledger.dtypes import dtypes
from memc.ledger.entries import Account, Entry, Moment, Resource
from memc.ledger.parts import host_entry
from memc.ledger.states import COPYING_OPTIMIZERS, ParamCounts, adam_bytes, parameter_entries
from memc.units import ceil_div


def checkpoint_entries(
    model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts
) -> list[Entry]:
    """Returns what a node holds while it saves and while it resumes."""
    weights = _save(model, config, counts, facts)
    return [weights, _states(config, counts, weights.bytes), _resume(config, counts, facts)]


def _save(model: ModelFacts, config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> Entry:
    """Returns what is held while weights are written.

    Source: safetensors copies tensors to the host before it writes them. DeepSpeed: ZeRO-3 gathers 16-bit weights on
        rank 0; below it every rank copies its whole model to the host (accelerate get_state_dict, deepspeed
        clone_tensors_for_torch_save), frozen weights and both names of a tied tensor too.
    """
    types, ranks, source = dtypes(config), config.gpus_per_node, "transformers save_pretrained"
    if config.engine is Engine.DEEPSPEED and config.zero_stage < 3:
        whole = sum(
            entry.bytes
            for entry in parameter_entries(config, counts, facts)
            if entry.resource is Resource.GPU and Moment.SAVE in entry.moments
        )
        twice = types.weight * model.vocab_size * model.hidden_size if model.tied else 0
        size = ranks * (whole + twice)
        text = f"{ranks} ranks x {whole} B of weights" + (f" and {twice} B of the tied tensor again" if twice else "")
        source = "accelerate accelerator.py get_state_dict; deepspeed clone_tensors_for_torch_save"
    elif config.method is Method.FULL:
        size, text = types.weight * counts.total, f"{types.weight} B x {counts.total} elements on rank 0"
    else:
        size = types.adapter * counts.adapters
        text = f"{types.adapter} B x {counts.adapters} adapter elements on rank 0"
    return host_entry("weights-being-saved", Account.PARAMETERS, size, frozenset({Moment.SAVE}), text, source)


def _states(config: TrainingConfig, counts: ParamCounts, weights: int) -> Entry:
    """Returns what DeepSpeed's states take more than the weights, which are let go of before them.

    Source: deepspeed engine.py save_checkpoint: every rank writes its own; torch serialization.py _save: one storage
        after the other is copied to the host, unless it is there.
    """
    zero, size, storage = config.zero, 0, 0
    if zero is not None and zero.offload_optimizer is Offload.NONE:
        share = ceil_div(counts.trainable, config.world_size)
        storage = zero.master_bytes * (min(share, zero.sub_group_elements) if zero.stage == 3 else share)
        size = max(0, config.gpus_per_node * storage - weights)
    return host_entry(
        "state-being-written",
        Account.OPTIMIZER_STATES,
        size,
        frozenset({Moment.SAVE}),
        f"{config.gpus_per_node} ranks x {storage} B, one storage each, in place of {weights} B of weights",
        "deepspeed engine.py save_checkpoint; torch serialization.py _save",
    )


def _resume(config: TrainingConfig, counts: ParamCounts, facts: LedgerFacts) -> Entry:
    """Returns what is read into host memory when a run goes on from a checkpoint.

    DeepSpeed reads a rank's weights (whole below ZeRO-3, without frozen ones), lets go of them and reads its states.
    A single process reads its optimizer's states to the host; several read them to their GPUs. Weights in safetensors
    are pages of the file that all ranks share, and are not counted.

    Source: deepspeed engine.py load_checkpoint; transformers trainer.py _load_optimizer_and_scheduler.
    """
    types, ranks, zero = dtypes(config), config.gpus_per_node, config.zero
    source = "transformers trainer.py _load_optimizer_and_scheduler"
    size, text = 0, "nothing: states are read to the GPUs"
    if zero is not None:
        source = "deepspeed engine.py load_checkpoint"
        if zero.stage < 3:
            one = types.weight * counts.total if config.method is Method.FULL else types.adapter * counts.adapters
            size, text = ranks * one, f"{ranks} ranks x {one} B of weights"
        share = ceil_div(counts.trainable, config.world_size)
        per_element = zero.master_bytes + 2 * zero.moment_bytes
        if zero.offload_optimizer is not Offload.NVME and ranks * per_element * share > size:
            size = ranks * per_element * share
            text = f"{ranks} ranks x {per_element} B x {share} elements of masters and moments"
    elif config.world_size == 1:
        copies = 2 if config.optimizer in COPYING_OPTIMIZERS else 1
        moments, formula = adam_bytes(config, counts, types, facts)
        size, text = copies * moments, f"{copies} x ({formula})" if copies > 1 else formula
    return host_entry("state-being-read", Account.OPTIMIZER_STATES, size, frozenset({Moment.RESUME}), text, source)
