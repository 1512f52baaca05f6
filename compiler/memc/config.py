"""TrainingConfig: one fully resolved configuration of a training run, and the enums it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

_LONGEST_SHAPE = 200
"""Most that the longer side of an image of any size may be of the shorter one."""


class Task(StrEnum):
    """What is trained: `sft` and `dpo` with TRL's trainers, the others with transformers' Trainer."""

    SFT = "sft"
    PRETRAIN = "pretrain"
    DPO = "dpo"
    CLASSIFICATION = "classification"

    @property
    def sequences_per_sample(self) -> int:
        """Sequences that one sample is: a preference pair is two, one with each answer."""
        return 2 if self is Task.DPO else 1


class Reference(StrEnum):
    """Where preference training has its reference from.

    `none`: the task has no reference. `adapters_off`: the model itself, its adapters switched off. `model`: a second,
    frozen model. `precomputed`: log-probabilities of all pairs, computed once before the first step.
    """

    NONE = "none"
    ADAPTERS_OFF = "adapters_off"
    MODEL = "model"
    PRECOMPUTED = "precomputed"


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
    """Who runs the step: one process, DistributedDataParallel, DeepSpeed (any ZeRO stage, any offload) or FSDP."""

    SINGLE = "single"
    DDP = "ddp"
    DEEPSPEED = "deepspeed"
    FSDP = "fsdp"


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
    PAGED_ADAMW = "paged_adamw_32bit"


class Offload(StrEnum):
    """Where offloaded state lives."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


class AdapterPrecision(StrEnum):
    """Data type of LoRA adapters: PEFT's default fp32, or that of the base model."""

    FP32 = "fp32"
    BASE = "base"


class BasePrecision(StrEnum):
    """Data type in which weights that are not quantised are loaded.

    `script` is what memc writes: fp32 where all weights train under autocast, else that of the matrix products.
    """

    SCRIPT = "script"
    HALF = "half"
    FP32 = "fp32"


class Quantization(StrEnum):
    """Format of a 4-bit base: bitsandbytes NF4, which memc writes, or GPTQ, which a checkpoint can bring."""

    NF4 = "nf4"
    GPTQ = "gptq"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters.

    Attributes:
        rank: Inner dimension of each adapter pair.
        alpha: Scale numerator; the update is multiplied by alpha / rank.
        dropout: Probability on the adapter input; 0 adds no mask and no copy.
        target_modules: Names of the linear modules that carry an adapter, in the order of the block.
        precision: Data type of the adapters.
        modules_to_save: Names of modules outside the blocks of which a copy trains whole beside the adapters.
        trains_embedding, trains_head: Whether the input embedding and the head of a causal language model are among
            them; where the two are one tensor, both are.
        new_tokens: Tokens that are added to the vocabulary, of which only the rows train (`trainable_token_indices`).
        skipped_stacks: Names of stacks beside the main one whose linears carry no adapter, whatever they are called.
    """

    rank: int
    alpha: int
    dropout: float
    target_modules: tuple[str, ...]
    precision: AdapterPrecision = AdapterPrecision.FP32
    modules_to_save: tuple[str, ...] = ()
    trains_embedding: bool = False
    trains_head: bool = False
    new_tokens: int = 0
    skipped_stacks: tuple[str, ...] = ()

    @property
    def excluded_modules(self) -> str:
        """The pattern of what PEFT leaves alone (`exclude_modules`): all below the skipped stacks; else empty."""
        names = "|".join([name.rpartition(".")[2] for name in self.skipped_stacks])
        return rf"(.*\.)?({names})\..*" if names else ""


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
        hpz_partition: `zero_hpz_partition_size`: ranks that share a second copy of the weights, so that gathering stays
            among them; 1 keeps no second copy. Stage 3 only.
        partitioned_at_load: Stage 3: whether weights are cut while they are loaded (`zero.Init`, as transformers does),
            or the whole model is put on every GPU first.
        bf16_master_weights: Whether masters and reduced gradients are bf16 (`bf16_master_weights_and_grads`).
        bf16_states: Whether Adam's moments are bf16 (`bf16_optimizer_states`); needs `bf16_master_weights`.
        nvme_buffer_elements: `buffer_size` of one buffer through which parameters pass on their way to NVMe.
        nvme_buffers: `buffer_count` of those buffers.
        nvme_resident_elements: `max_in_cpu`, parameter elements that stay in host memory all the same.
        nvme_state_buffers: `buffer_count` of the optimizer's buffers, each as large as the largest sub-group.
        nvme_block_bytes, nvme_queue_depth, nvme_threads: `aio`: size of a request, requests in flight, threads.
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
    hpz_partition: int = 1
    partitioned_at_load: bool = True
    bf16_master_weights: bool = False
    bf16_states: bool = False
    nvme_buffer_elements: int = 0
    nvme_buffers: int = 0
    nvme_resident_elements: int = 0
    nvme_state_buffers: int = 0
    nvme_block_bytes: int = 0
    nvme_queue_depth: int = 0
    nvme_threads: int = 0

    @property
    def master_bytes(self) -> int:
        """Bytes of one element of the master weights."""
        return 2 if self.bf16_master_weights else 4

    @property
    def moment_bytes(self) -> int:
        """Bytes of one element of each of Adam's moments."""
        return 2 if self.bf16_states else 4


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """Fully sharded data parallelism, as accelerate's plugin sets it up.

    Attributes:
        version: 2 for `fully_shard` (a shard per parameter); 1 for FullyShardedDataParallel (flat parameters), which
            can be priced but is not written.
        reshard_after_forward: Whether a layer's gathered weights are freed after its forward (like ZeRO-3); otherwise
            they stay until its backward, and only gradients and states are sharded (like ZeRO-2).
        hybrid: Whether a copy is sharded over one node and replicated across nodes, rather than over all ranks.
        offload: `cpu` keeps shards, gradients, states and the optimizer step in host memory.
        efficient_loading: Whether only rank 0 reads the checkpoint and the others receive their shards.
        loads_by_layer: Version 2: whether a 4-bit base is quantised layer by layer as it is cut, as memc writes;
            otherwise it lies whole on every GPU first.
        sharded_checkpoints: Whether checkpoints hold one file per rank rather than whole tensors gathered on rank 0.
        reduce_each_micro_batch: Whether gradients are reduced after every micro-batch, so that only shards accumulate;
            otherwise whole gradients do, and are reduced once per step.
        reduce_fp32: Whether gradients are reduced in fp32 (`reduce_dtype`) rather than in the type of the products.
        mixed_units: Version 1: whether frozen and trained weights share a flat parameter (`use_orig_params`), whose
            gradient then has an element for each of them; otherwise what trains is wrapped by itself.
        backward_prefetch: Version 1: whether the next layer is gathered while the current one runs backward (version 2
            always does).
    """

    version: int = 2
    reshard_after_forward: bool = True
    hybrid: bool = False
    offload: Offload = Offload.NONE
    efficient_loading: bool = True
    loads_by_layer: bool = True
    sharded_checkpoints: bool = True
    reduce_each_micro_batch: bool = True
    reduce_fp32: bool = False
    mixed_units: bool = False
    backward_prefetch: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Every choice of one run, resolved. Nothing here is None for "decide later".

    Attributes:
        checkpoint_every: 0 keeps all activations, 1 checkpoints every layer, k every k-th layer.
        padding_mask: Whether an attention mask reaches the attention kernel (unpacked batches of more than one).
        lora: Adapter settings; None exactly when method is full.
        zero: ZeRO settings; None exactly when engine is not deepspeed.
        world_size: Number of processes, one per GPU.
        shard_ranks: Ranks that one copy of what is sharded is spread over; 1 when nothing is.
        data_parallel_ranks: Ranks that see different samples: all, unless several share each sequence.
        eval_batch_size: Samples per GPU in evaluation; 0 when the run does not evaluate.
        expandable_segments: Whether the launcher switches the caching allocator to expandable segments.
        double_quantization: Whether the quantisation constants of a 4-bit base are quantised too.
        fsdp: FSDP settings; None exactly when engine is not fsdp.
        checkpoint_offload: Whether what checkpointing keeps of each layer, its input, waits in pinned host memory.
        context_parallel: Ranks that share each sequence; 1 gives every rank whole sequences.
        base_precision: Data type of the loaded weights that are not quantised.
        quantization: Format of a 4-bit base; matters only when method is qlora.
        upcast_unquantized: Whether what a 4-bit base leaves unquantised is cast to fp32 (PEFT's
            `prepare_model_for_kbit_training`), and with it the residual stream.
        classes: Classes that texts are sorted into; 0 for other tasks.
        reference: Where the reference of preference training comes from.
        images_per_sample: Images in one sample of a model that sees images beside text; 0 for text alone.
        image_pixels: Pixels of one image, where the model takes images of any size.
        reentrant_checkpointing: Whether a checkpointed layer is recomputed by a backward inside the backward (torch's
            `use_reentrant`) rather than when its saved tensors are asked for.
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
    fsdp: FsdpConfig | None = None
    checkpoint_offload: bool = False
    context_parallel: int = 1
    base_precision: BasePrecision = BasePrecision.SCRIPT
    quantization: Quantization = Quantization.NF4
    upcast_unquantized: bool = False
    reentrant_checkpointing: bool = False
    reference: Reference = Reference.NONE
    classes: int = 0
    images_per_sample: int = 1
    image_pixels: int = 448 * 448

    @property
    def world_size(self) -> int:
        """Number of processes, one per GPU."""
        return self.gpus_per_node * self.nodes

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.world_size // self.context_parallel

    @property
    def quantizes_layer_by_layer(self) -> bool:
        """Whether a 4-bit base is quantised layer by layer as FSDP cuts it, and never lies whole on a GPU."""
        return (
            self.method is Method.QLORA
            and self.fsdp is not None
            and self.fsdp.version == 2
            and self.fsdp.loads_by_layer
        )

    @property
    def shard_ranks(self) -> int:
        """Ranks that one copy of what is sharded is spread over (ZeRO 1 to 3, FSDP); 1 when nothing is sharded."""
        if self.fsdp is not None:
            return self.gpus_per_node if self.fsdp.hybrid else self.world_size
        return self.world_size if self.zero is not None and self.zero.stage else 1

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.data_parallel_ranks

    @property
    def local_length(self) -> int:
        """Tokens of the longest sequence that one GPU holds: all, unless several ranks share it."""
        return -(-self.max_length // self.context_parallel)

    def patch_grid(self, side: int, merge: int) -> tuple[int, int]:
        """Returns the rows and columns of patches of the largest image, as `patch_grid`.

        Args:
            side: Pixels of a patch's side.
            merge: Patches along each side of the square that becomes one position of the text.
        """
        return patch_grid(self.image_pixels, side, merge)

    @property
    def micro_batch_sequences(self) -> int:
        """Sequences that one GPU holds in one forward pass."""
        return self.micro_batch_size * self.task.sequences_per_sample

    @property
    def eval_batch_sequences(self) -> int:
        """Sequences that one GPU holds in one forward pass of evaluation."""
        return self.eval_batch_size * self.task.sequences_per_sample

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that one GPU holds in one forward pass, at the longest sequence."""
        return self.micro_batch_sequences * self.local_length

    @property
    def zero_stage(self) -> int:
        """ZeRO stage; 0 without DeepSpeed."""
        return self.zero.stage if self.zero is not None else 0

    @property
    def offload_optimizer(self) -> Offload:
        """Where masters, moments and the optimizer step are."""
        if self.fsdp is not None:
            return self.fsdp.offload
        return self.zero.offload_optimizer if self.zero is not None else Offload.NONE

    @property
    def offload_param(self) -> Offload:
        """Where weights wait between their uses."""
        if self.fsdp is not None:
            return self.fsdp.offload
        return self.zero.offload_param if self.zero is not None else Offload.NONE


@cache
def patch_grid(pixels: int, side: int, merge: int) -> tuple[int, int]:
    """Returns the rows and columns of patches of the image with the most positions that its pixels allow.

    Of several such images it is the one that is nearest to a square.
    Source: transformers models/qwen2_vl/image_processing_qwen2_vl.py smart_resize, which refuses longer images.

    Args:
        pixels: Most pixels of an image.
        side: Pixels of a patch's side.
        merge: Patches along each side of the square that becomes one position of the text.
    """
    positions = max(1, pixels // (side * merge) ** 2)
    best = 0, 0
    for rows in range(int(positions**0.5), 0, -1):
        columns = positions // rows
        if columns > _LONGEST_SHAPE * rows:
            break
        if rows * columns > best[0] * best[1]:
            best = rows, columns
    return best[0] * merge, best[1] * merge
