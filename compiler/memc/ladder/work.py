"""Techniques that cut what a step computes with: the loss, the micro-batch, checkpointing, the share of a sequence.

They move the instant of a layer at which it peaks, and with it which gradients and which casts of weights are alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memc.config import Attention, Engine, LossHead, Task, TrainingConfig
from memc.facts.records import Objective
from memc.ladder.technique import Dimension, Fidelity, Situation, Technique
from memc.ledger.entries import Account


def with_micro_batch(config: TrainingConfig, size: int) -> TrainingConfig:
    """Returns the configuration with another micro-batch and the same samples per step.

    `size` must divide micro-batch x accumulation. Evaluation follows the micro-batch; a batch of one needs no mask.
    """
    per_rank = config.micro_batch_size * config.gradient_accumulation_steps
    evaluation = min(size, config.eval_batch_size)
    return replace(
        config,
        micro_batch_size=size,
        gradient_accumulation_steps=per_rank // size,
        eval_batch_size=evaluation,
        padding_mask=config.padding_mask and size * config.task.sequences_per_sample > 1,
    )


_FP8_FROM = (8, 9)  # accelerate utils/environment.py check_cuda_fp8_capability


def _loss_why_not(config: TrainingConfig, situation: Situation) -> str | None:
    if situation.model.objective not in (Objective.CAUSAL_LM, Objective.IMAGE_TEXT_LM):
        return "only the loss of causal language models is computed in tiles"
    if not situation.model.tiled_loss:
        return "its class does not tell its layers from its head, as TRL's tiles need"
    if config.task is Task.CLASSIFICATION:
        return "a head for classes has no logits of a vocabulary"
    return "the loss is chunked already" if config.loss is LossHead.CHUNKED else None


def _accumulation_why_not(divisor: int) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, _situation: Situation) -> str | None:
        if config.micro_batch_size % divisor:
            return f"a micro-batch of {config.micro_batch_size} does not divide by {divisor}"
        return None

    return why_not


def _checkpoint_why_not(every: int) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(_config: TrainingConfig, situation: Situation) -> str | None:
        layers = situation.model.num_layers
        return f"the model has only {layers} layers" if layers < every else None

    return why_not


def _checkpoint_offload_why_not(config: TrainingConfig, situation: Situation) -> str | None:
    if not config.checkpoint_every:
        return "nothing is checkpointed, so there is nothing to move"
    if config.checkpoint_offload:
        return "checkpoints wait in host memory already"
    return "hardware.host_memory is not given" if situation.host_bytes is None else None


def _context_why_not(size: int) -> Callable[[TrainingConfig, Situation], str | None]:
    def why_not(config: TrainingConfig, situation: Situation) -> str | None:
        if situation.model.objective is Objective.IMAGE_TEXT_LM:
            return "images are put among the tokens of whole sequences"
        if config.engine is not Engine.FSDP or config.fsdp is None or config.fsdp.version != 2:
            return "only FSDP2 shares a sequence between GPUs"
        if config.world_size % size:
            return f"{size} does not divide {config.world_size} GPUs"
        if config.gpus_per_node % size:
            return f"{size} GPUs that share a sequence would lie in more than one node"
        if config.fsdp.hybrid and config.gpus_per_node == size:
            return "a whole node would share each sequence, and leave nothing to shard over"
        if config.max_length % (2 * size):
            return f"max_length {config.max_length} does not divide into {2 * size} equal pieces"
        if config.attention is not Attention.SDPA:
            return f"only SDPA attention is shared between GPUs, not {config.attention}"
        if config.task is Task.DPO:
            return "preference pairs are padded, and scored with a mask that a shared sequence cannot have"
        if config.packing and config.task is Task.SFT:
            return "packed samples need a mask, which a shared sequence cannot have"
        return None

    return why_not


def with_context_parallel(config: TrainingConfig, size: int) -> TrainingConfig:
    """Returns the configuration with sequences shared by `size` GPUs, and as many samples per step as before.

    Padding stands at the end, where causal attention never looks: the mask is dropped.

    Source: accelerate accelerator.py _attach_context_parallel_hooks.
    """
    steps = config.gradient_accumulation_steps * size // config.context_parallel
    return replace(config, context_parallel=size, gradient_accumulation_steps=steps, padding_mask=False)


def accumulation(divisor: int) -> Technique:
    """Returns the technique that divides the micro-batch by `divisor`."""
    return Technique(
        name=f"accumulate-{divisor}x",
        rung=3,
        dimension=Dimension.MICRO_BATCH,
        accounts=(Account.ACTIVATIONS, Account.GRADIENTS, Account.PARAMETERS),
        fidelity=Fidelity.MEMORY,
        needs=f"a micro-batch that divides by {divisor}",
        boundary="A micro-batch of 1 is the end; very small ones leave the card waiting for launches.",
        why_not=_accumulation_why_not(divisor),
        apply=lambda config, _: with_micro_batch(config, config.micro_batch_size // divisor),
    )


def checkpointing(every: int) -> Technique:
    """Returns the technique that checkpoints every `every`-th layer."""
    return Technique(
        name="checkpoint-every-layer" if every == 1 else f"checkpoint-every-{every}-layers",
        rung=4,
        dimension=Dimension.CHECKPOINTING,
        accounts=(Account.ACTIVATIONS, Account.PARAMETERS, Account.GRADIENTS),
        fidelity=Fidelity.MEMORY,
        needs="a model whose layers support it",
        boundary="Repeats up to one forward pass; pays little where weights and states are the wall.",
        why_not=_checkpoint_why_not(every),
        apply=lambda config, _: replace(config, checkpoint_every=every),
    )


def context_parallel(size: int) -> Technique:
    """Returns the technique that lets `size` GPUs share each sequence."""
    return Technique(
        name=f"context-parallel-{size}",
        rung=10,
        dimension=Dimension.CONTEXT,
        accounts=(Account.ACTIVATIONS, Account.GRADIENTS, Account.PARAMETERS),
        fidelity=Fidelity.MEMORY,
        needs="FSDP2, SDPA attention without a mask, GPUs of one node",
        boundary="Every layer gathers keys and values of the whole sequence; short sequences wait for that.",
        why_not=_context_why_not(size),
        apply=lambda config, _: with_context_parallel(config, size),
    )


def _fp8_why_not(_config: TrainingConfig, situation: Situation) -> str | None:
    capability = situation.gpu.compute_capability
    if capability is None or capability < _FP8_FROM:
        return f"{situation.gpu.name} has no FP8 matrix units"
    return (
        "FP8 products keep 16- or 32-bit weights and make 8-bit copies beside them: they save time, not memory, and "
        "need torchao or Transformer Engine, for which memc writes nothing"
    )


# Kept on the ladder for its reason alone: people ask for it when memory is short.
FP8 = Technique(
    name="fp8",
    rung=6,
    dimension=Dimension.PRODUCTS,
    accounts=(Account.ACTIVATIONS,),
    fidelity=Fidelity.NUMERICS,
    needs="FP8 matrix units, torchao or Transformer Engine",
    boundary="Saves time where matrix products are the wall, and no memory.",
    why_not=_fp8_why_not,
    apply=lambda config, _: config,
)
CHUNKED_LOSS = Technique(
    name="chunked-loss",
    rung=2,
    dimension=Dimension.LOSS,
    accounts=(Account.ACTIVATIONS, Account.GRADIENTS, Account.PARAMETERS),
    fidelity=Fidelity.MEMORY,
    needs="a causal language model head",
    boundary="Saves nothing once logits are small beside the layers.",
    why_not=_loss_why_not,
    apply=lambda config, _: replace(config, loss=LossHead.CHUNKED),
)
CHECKPOINT_OFFLOAD = Technique(
    name="checkpoint-offload",
    rung=4,
    dimension=Dimension.CHECKPOINT_OFFLOAD,
    accounts=(Account.ACTIVATIONS, Account.GRADIENTS, Account.PARAMETERS),
    fidelity=Fidelity.MEMORY,
    needs="activation checkpointing, host memory for one input per layer",
    boundary="Copies wait on the compute stream in both directions: pays for long sequences, not for short ones.",
    why_not=_checkpoint_offload_why_not,
    apply=lambda config, _: replace(config, checkpoint_offload=True),
)
