"""TrainingConfig: one fully resolved configuration of a training run, and the enums it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Task(StrEnum):
    """What is trained: `sft` with TRL's SFTTrainer, `pretrain` with transformers' Trainer."""

    SFT = "sft"
    PRETRAIN = "pretrain"


class Method(StrEnum):
    """Which parameters train: all, low-rank adapters, or adapters over a 4-bit base."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Precision(StrEnum):
    """Data type of matrix products. `bf16_pure` keeps weights, gradients and optimizer states in bf16 too."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    BF16_PURE = "bf16_pure"


class Engine(StrEnum):
    """Who runs the step: one process, DistributedDataParallel, or DeepSpeed (any ZeRO stage, any offload)."""

    SINGLE = "single"
    DDP = "ddp"
    DEEPSPEED = "deepspeed"


class Attention(StrEnum):
    """Attention implementation, by its transformers name."""

    SDPA = "sdpa"
    EAGER = "eager"
    FLASH_ATTENTION_2 = "flash_attention_2"


class LossHead(StrEnum):
    """`plain` materialises the logits of all tokens; `chunked` computes the loss tile by tile."""

    PLAIN = "plain"
    CHUNKED = "chunked"


class Optimizer(StrEnum):
    """Optimizer, by its transformers name (`optim` of TrainingArguments)."""

    ADAMW = "adamw_torch_fused"
    ADAMW_FOREACH = "adamw_torch"
    ADAMW_8BIT = "adamw_8bit"
    PAGED_ADAMW_8BIT = "paged_adamw_8bit"


class Offload(StrEnum):
    """Where offloaded state lives."""

    NONE = "none"
    CPU = "cpu"


class AdapterPrecision(StrEnum):
    """Data type of LoRA adapters: PEFT's default fp32, or that of the base model."""

    FP32 = "fp32"
    BASE = "base"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters.

    Attributes:
        rank: Inner dimension of each adapter pair.
        alpha: Scale numerator; the update is multiplied by alpha / rank.
        dropout: Probability on the adapter input; 0 adds no mask and no copy.
        target_modules: Names of the linear modules that carry an adapter, in the order of the block.
        precision: Data type of the adapters.
    """

    rank: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...]
    precision: AdapterPrecision = AdapterPrecision.FP32


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """DeepSpeed ZeRO settings. Counts are elements, as in ds_config.json; None only for keys a stage lacks.

    Attributes:
        stage: 0 to 3. 0 is plain data parallelism.
        offload_optimizer: Where optimizer states and masters live.
        offload_param: Where the 16-bit shards live; needs stage 3.
        reduce_bucket_elements: `reduce_bucket_size`.
        allgather_bucket_elements: `allgather_bucket_size` (stages 1 and 2).
        prefetch_elements: `stage3_prefetch_bucket_size`.
        persistence_elements: `stage3_param_persistence_threshold`, per parameter.
        max_live_elements: `stage3_max_live_parameters`.
        sub_group_elements: `sub_group_size`, the unit of the stage 3 step.
        overlap_comm: Whether a second bucket lets reduction overlap with backward.
    """

    stage: int
    offload_optimizer: Offload = Offload.NONE
    offload_param: Offload = Offload.NONE
    reduce_bucket_elements: int
    allgather_bucket_elements: int
    prefetch_elements: int
    persistence_elements: int
    max_live_elements: int
    sub_group_elements: int
    overlap_comm: bool


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Every choice of one run, resolved. Nothing here is None for "decide later".

    Attributes:
        checkpoint_every: 0 keeps all activations, 1 checkpoints every layer, k every k-th layer.
        padding_mask: Whether an attention mask reaches the attention kernel (unpacked batches of more than one).
        lora: Adapter settings; None exactly when method is full.
        zero: ZeRO settings; None exactly when engine is not deepspeed.
        world_size: Number of processes, one per GPU.
        eval_batch_size: Samples per GPU in evaluation; 0 when the run does not evaluate.
        expandable_segments: Whether the launcher switches the caching allocator to expandable segments.
        double_quantization: Whether the quantisation constants of a 4-bit base are quantised too.
    """

    task: Task
    method: Method
    precision: Precision
    engine: Engine
    gpus_per_node: int
    nodes: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    max_length: int
    packing: bool
    padding_mask: bool
    attention: Attention
    loss: LossHead
    checkpoint_every: int
    optimizer: Optimizer
    lora: LoraConfig | None
    zero: ZeroConfig | None
    eval_batch_size: int
    expandable_segments: bool = True
    gradient_as_bucket_view: bool = True
    double_quantization: bool = True

    @property
    def world_size(self) -> int:
        """Number of processes, one per GPU."""
        return self.gpus_per_node * self.nodes

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that one GPU holds in one forward pass, at the longest sequence."""
        return self.micro_batch_size * self.max_length

    @property
    def zero_stage(self) -> int:
        """ZeRO stage; 0 without DeepSpeed."""
        return self.zero.stage if self.zero is not None else 0
