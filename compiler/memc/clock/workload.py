"""Workload: what one GPU does in one optimizer step, in the clock's own terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from memc.config import (
    Attention,
    Engine,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Reference,
    TrainingConfig,
)
from memc.ledger.dtypes import dtypes


class Kernels(StrEnum):
    """Who writes the kernels between the matrix products.

    `eager`: one kernel per operation of the modelling code. `fused`: norms, rotation, gated activation and loss are one
    kernel each (Liger, Unsloth and their kin). `compiled`: torch.compile merges neighbours and launches ahead.
    """

    EAGER = "eager"
    FUSED = "fused"
    COMPILED = "compiled"


class AttentionKernel(StrEnum):
    """How scores are computed. All but `eager` never write them to memory; `flash1` is the first version.

    `masked` is what torch falls back to where a mask is handed over: it computes what the mask hides, too.
    """

    EAGER = "eager"
    FLASH1 = "flash1"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    MASKED = "masked"


class Sharding(StrEnum):
    """What data parallelism divides among ranks: nothing, optimizer states, gradients too, weights too."""

    NONE = "none"
    STATES = "states"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"


class AdamKind(StrEnum):
    """How the optimizer runs on the GPU: one kernel, one kernel per operation over lists, or 8-bit blocks."""

    FUSED = "fused"
    FOREACH = "foreach"
    EIGHT_BIT = "eight_bit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What a micro-batch computes on one GPU; two equal ones take the same time, so it keys the cache.

    Attributes:
        samples: Sequences per micro-batch.
        length: Tokens of one sequence that this GPU holds.
        context: Tokens of the whole sequence; more than `length` when ranks share it.
        dtype: Type of matrix products: ``bf16``, ``fp16``, ``tf32``, ``fp32``, ``fp8``.
        stream_bytes: Element of the residual stream.
        autocast: Whether fp32 weights are cast to 16 bits in every pass on this GPU.
        trains: Whether the base weights train.
        quantized: Whether base linears are 4-bit and are dequantised in every pass.
        rank: LoRA rank; 0 without adapters.
        adapted: Names of the adapted linears.
        adapter_bytes: Element of an adapter; more than 2 makes each adapted input a cast copy.
        dropout: Whether adapter inputs pass through dropout.
        kernels: Who writes the kernels between the matrix products.
        attention: How scores are computed.
        recompute: Share of the layers whose forward runs again in backward.
        recompute_products: Share of matrix products in such a layer that are computed again (selective recipes keep
            some of their results).
        recompute_attention: Whether attention is computed again too.
        chunked_loss: Whether the loss is computed tile by tile, each tile's logits twice.
        fused_loss: Whether the loss is one kernel in 16 bits rather than a chain in fp32.
        gathered: Whether weights are gathered before each use: every rank copies them out of the collective's buffer.
        tensor_parallel: Ranks that share every matrix product.
        stages: Pipeline stages that share the layers.
        images: Images of one sample; 0 where it has none.
        image_pixels: Pixels of one, where images have any size.
        experts_apart: Whether eager code runs experts one after another (transformers before 5) rather than in one
            grouped product.
    """

    samples: int
    length: int
    context: int
    dtype: str
    stream_bytes: int
    autocast: bool
    trains: bool
    quantized: bool
    rank: int = 0
    adapted: frozenset[str] = frozenset()
    adapter_bytes: int = 2
    dropout: bool = False
    kernels: Kernels = Kernels.EAGER
    attention: AttentionKernel = AttentionKernel.FLASH2
    recompute: float = 0.0
    recompute_products: float = 1.0
    recompute_attention: bool = True
    chunked_loss: bool = False
    fused_loss: bool = False
    gathered: bool = False
    tensor_parallel: int = 1
    stages: int = 1
    experts_apart: bool = False
    images: int = 1
    image_pixels: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch on this GPU."""
        return self.samples * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the step is spread over the machine.

    Attributes:
        micro_batches: Forward and backward passes per optimizer step.
        gpus_per_node, nodes: The machine.
        data_ranks: Ranks that see different samples.
        shard_ranks: Ranks that share one copy of what is sharded.
        shards_within_node: Whether those ranks sit in one node (hybrid sharding).
        sharding: What is divided.
        gathers_in_forward: Whether weights are gathered layer by layer (FSDP, ZeRO-3) rather than all at once after the
            step (ZeRO-1 and 2).
        weight_bytes: Bytes per element in which weights are gathered, and updated weights come back.
        gradient_bytes: Bytes per element in which gradients are reduced.
        reduce_every_pass: Whether gradients are reduced in every micro-batch rather than in the last.
        adam: How the optimizer runs on the GPU.
        adam_bytes: Bytes per trainable element that its step reads and writes.
        offload_optimizer, offload_weights: Where states and weights wait.
        offload_activations: Whether layer inputs wait in host memory.
        torch_host_adam: Whether the optimizer on the host is torch's own rather than DeepSpeed's.
        paged_bytes: Bytes of optimizer states per trainable element that every step moves to the GPU and back.
        regather_ranks: Ranks that gather weights for backward; fewer than `shard_ranks` where a second copy is kept.
        context_parallel: Ranks that share a sequence.
        gathered_forwards: Forward passes of a micro-batch for which weights are gathered: two with a reference.
    """

    micro_batches: int
    gpus_per_node: int
    nodes: int
    data_ranks: int
    shard_ranks: int = 1
    shards_within_node: bool = False
    sharding: Sharding = Sharding.NONE
    gathers_in_forward: bool = False
    weight_bytes: float = 2.0
    gradient_bytes: int = 2
    reduce_every_pass: bool = False
    adam: AdamKind = AdamKind.FUSED
    adam_bytes: float = 28.0
    offload_optimizer: Offload = Offload.NONE
    offload_weights: Offload = Offload.NONE
    offload_activations: bool = False
    torch_host_adam: bool = False
    paged_bytes: float = 0.0
    regather_ranks: int = 0
    context_parallel: int = 1
    gathered_forwards: int = 1


_DTYPES = {Precision.FP16: "fp16", Precision.FP32: "fp32"}
_ATTENTION = {Attention.EAGER: AttentionKernel.EAGER}


def compute_of(config: TrainingConfig) -> Compute:
    """Returns what one micro-batch of a configuration computes, at the longest sequence."""
    types = dtypes(config)
    lora = config.lora
    layers_again = 1 / config.checkpoint_every if config.checkpoint_every else 0.0
    chunked = config.loss is LossHead.CHUNKED
    return Compute(
        samples=config.micro_batch_sequences,
        length=config.local_length,
        context=config.max_length,
        dtype=_DTYPES.get(config.precision, "bf16"),
        stream_bytes=types.stream,
        autocast=types.autocast and types.weight > 2,
        trains=config.method is Method.FULL,
        quantized=config.method is Method.QLORA,
        rank=lora.rank if lora is not None else 0,
        adapted=frozenset(lora.target_modules) if lora is not None else frozenset(),
        adapter_bytes=types.adapter,
        dropout=lora is not None and lora.dropout > 0,
        attention=_attention(config),
        recompute=layers_again,
        chunked_loss=chunked,
        fused_loss=chunked,
        gathered=gathers_weights(config),
        images=config.images_per_sample,
        image_pixels=config.image_pixels,
    )


def reference_compute(config: TrainingConfig) -> Compute | None:
    """Returns what the reference of preference training computes in every pass; None when no pass runs one.

    Only its forward counts: nothing of it trains, adapters are switched off, and nothing is computed again.
    """
    if config.reference not in (Reference.MODEL, Reference.ADAPTERS_OFF):
        return None
    return replace(compute_of(config), trains=False, rank=0, adapted=frozenset(), dropout=False, recompute=0.0)


def _attention(config: TrainingConfig) -> AttentionKernel:
    """Returns the kernel of a configuration's attention.

    Source: torch 2.13.0, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash attention takes no mask, and
        memory-efficient attention with one is not told that it is causal.
    """
    if config.attention is Attention.SDPA and config.padding_mask:
        return AttentionKernel.MASKED
    return _ATTENTION.get(config.attention, AttentionKernel.FLASH2)


def layout_of(config: TrainingConfig) -> Layout:
    """Returns how one step of a configuration is spread over the machine."""
    types = dtypes(config)
    sharding = _sharding(config)
    kind = _ADAM.get(config.optimizer, AdamKind.EIGHT_BIT)
    return Layout(
        micro_batches=config.gradient_accumulation_steps,
        gpus_per_node=config.gpus_per_node,
        nodes=config.nodes,
        data_ranks=config.world_size,
        shard_ranks=config.shard_ranks,
        shards_within_node=config.shard_ranks <= config.gpus_per_node,
        sharding=sharding,
        gathers_in_forward=config.fsdp is not None or sharding is Sharding.WEIGHTS,
        weight_bytes=_QUANTIZED_BYTES if config.method is Method.QLORA else float(min(2, types.weight)),
        gradient_bytes=types.gradient,
        reduce_every_pass=sharding in (Sharding.GRADIENTS, Sharding.WEIGHTS),
        adam=kind,
        adam_bytes=_adam_bytes(config, kind),
        offload_optimizer=config.offload_optimizer,
        offload_weights=config.offload_param,
        offload_activations=config.checkpoint_offload,
        torch_host_adam=config.fsdp is not None,
        paged_bytes=_PAGED_BYTES.get(config.optimizer, 0.0),
        regather_ranks=config.zero.hpz_partition if config.zero is not None and config.zero.hpz_partition > 1 else 0,
        context_parallel=config.context_parallel,
        gathered_forwards=2 if reference_compute(config) is not None else 1,
    )


def _adam_bytes(config: TrainingConfig, kind: AdamKind) -> float:
    """Returns bytes per trainable element that the optimizer step of a configuration moves on the GPU."""
    types, zero = dtypes(config), config.zero
    master, state = 4 if types.masters else 0, types.state
    if zero is not None and zero.bf16_master_weights:
        master, state = 2, 2 if zero.bf16_states else state
    return adam_bytes(kind, weight=types.stored, gradient=types.gradient, state=state, master=master)


_ADAM = {
    Optimizer.ADAMW: AdamKind.FUSED,
    Optimizer.PAGED_ADAMW: AdamKind.FUSED,
    Optimizer.ADAMW_FOREACH: AdamKind.FOREACH,
}
# Two moments of each element, in 8 or in 32 bits.
_PAGED_BYTES = {Optimizer.PAGED_ADAMW_8BIT: 2.0, Optimizer.PAGED_ADAMW: 8.0}
# Half a byte per element, and the fp32 constant of each block of 64.
_QUANTIZED_BYTES = 0.5 + 4 / 64


def gathers_weights(config: TrainingConfig) -> bool:
    """Whether the weights of each layer are gathered before its use and freed after it."""
    return config.shard_ranks > 1 and _sharding(config) is Sharding.WEIGHTS


def _sharding(config: TrainingConfig) -> Sharding:
    if config.fsdp is not None:
        return Sharding.WEIGHTS if config.fsdp.reshard_after_forward else Sharding.GRADIENTS
    if config.engine is not Engine.DEEPSPEED:
        return Sharding.NONE
    return (Sharding.NONE, Sharding.STATES, Sharding.GRADIENTS, Sharding.WEIGHTS)[config.zero_stage]


def adam_bytes(kind: AdamKind, *, weight: int, gradient: int, state: int, master: int) -> float:
    """Returns bytes per trainable element that an Adam step moves on the GPU, gradient clipping included.

    One fused kernel reads weight (its master), gradient and two moments and writes weight and moments. Over lists of
    tensors each operation is a pass of its own: weight decay (2 accesses of the weight), the first moment (2 of its
    own and the gradient), the second (scaled: 2, updated: 2 and the gradient), its root (2), the bias correction (2),
    the epsilon (2), the update (moment, denominator, 2 of the weight). 8-bit moments are one byte each. Clipping reads
    every gradient for the norm, and reads and writes it to scale.

    Source: torch 2.13.0 torch/optim/adamw.py (_fused, _multi_tensor_adamw), torch/nn/utils/clip_grad.py;
        bitsandbytes 0.50.2 optim/adamw.py; accesses counted by hand.
    """
    clipping = 3 * gradient
    own = master or weight
    out = weight if master else 0
    if kind is AdamKind.EIGHT_BIT:
        return clipping + gradient + 2 * own + out + 2 * 2
    if kind is AdamKind.FUSED:
        return clipping + gradient + 2 * own + out + 2 * 2 * state
    return clipping + 2 * gradient + 4 * own + out + 6 * state + 8 * state
