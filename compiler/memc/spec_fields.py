"""The fields of a spec, each with the sentence that the editor, the documentation and the errors show."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memc.config import AdapterPrecision, Attention, Engine, LossHead, Method, Offload, Optimizer, Precision, Task
from memc.spec_values import (
    CANONICAL,
    CheckpointEvery,
    Elements,
    Flag,
    Line,
    LrScheduler,
    Methods,
    ModuleSet,
    Names,
    Number,
    Objective,
    PreferenceLoss,
    ReferencePlace,
    RunLimitField,
    Scheduler,
    SizeField,
    SizeOrAuto,
    TargetModules,
    Text,
    Version,
)

DEFAULT_EPOCHS = 3.0
_FEWEST_CLASSES = 2


def _count(most: int, *, least: int = 1) -> Any:
    return Field(strict=True, ge=least, le=most)


Steps = Annotated[int, _count(10**9)]
StepsOrOff = Annotated[int, _count(10**9, least=0)]


class Section(BaseModel):
    """A part of the spec: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Data(Section):
    """What is trained on."""

    train: Text | None = None
    """Training file: JSONL, JSON or Parquet."""
    eval: Text | None = None
    """Evaluation file; without one the run does not evaluate."""
    max_length: Annotated[int, _count(2**24)] = Field(examples=[2048])
    """Longest sequence in tokens; longer samples are cut."""
    images_per_sample: Annotated[int, _count(1000, least=0)] | None = None
    """Images in one sample, for models that see images: their tokens come on top of `max_length`; 1 when not given."""
    image_pixels: Annotated[int, _count(10**9)] | None = None
    """Most pixels (height x width) of an image once resized, for models that take images of any size."""
    packing: Flag = False
    """Whether several samples share one sequence of `max_length` tokens."""
    samples: Annotated[int, _count(10**12)] | None = None
    """Number of training samples, when the file is elsewhere."""
    mean_tokens: Annotated[int, _count(10**9)] | None = None
    """Mean tokens per sample, when the file is elsewhere; `max_length` is assumed without it."""
    labels: Names = ()
    """Names of the classes of texts, in the order of their numbers; found in the training file when not given."""
    assistant_only_loss: Flag = False
    """Whether only the turns of the assistant carry loss (chat data)."""

    @property
    def classes(self) -> int:
        """Classes that texts are sorted into; 2 where the spec does not name them."""
        return len(self.labels) or _FEWEST_CLASSES


class Lora(Section):
    """Low-rank adapters, where the method uses them."""

    rank: Annotated[int, _count(65_536)] | None = None
    """Inner dimension of each adapter pair; chosen by memc when not given."""
    alpha: Annotated[int, _count(2**20)] | None = None
    """Scale numerator, the update is multiplied by alpha / rank; chosen by memc when not given."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapter input."""
    target_modules: TargetModules = ModuleSet.ALL_LINEAR
    """Modules that carry an adapter: attention, all-linear, or a list of module names."""
    image_tower: Flag = False
    """Whether the tower of a model that sees images carries adapters too; else it stays as it was loaded."""
    precision: AdapterPrecision = AdapterPrecision.FP32
    """Data type of the adapters: fp32, or base for that of the model."""
    new_tokens: Names = ()
    """Tokens to add to the vocabulary; only their rows of embedding and head train beside the adapters."""
    modules_to_save: Names = ()
    """Embedding or head to train whole beside the adapters: a copy with gradients and optimizer states of every row."""


class Dpo(Section):
    """The loss of preference training, where the task is dpo."""

    beta: Annotated[Number, Field(gt=0, le=1000)] = 0.1
    """How strongly the model is held to its reference."""
    loss: PreferenceLoss = PreferenceLoss.SIGMOID
    """Loss, by the name of TRL's `loss_type`."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Share of pairs taken to be the wrong way round; read by robust, exo_pair, aot and aot_unpaired."""


class Training(Section):
    """Hyper-parameters and cadence."""

    epochs: Annotated[Number, Field(gt=0, le=100_000)] | None = None
    """Passes over the data; 3 when `max_steps` is not given either."""
    max_steps: Steps | None = None
    """Optimizer steps, instead of `epochs`."""
    global_batch_size: Annotated[int, _count(2**24)] = 16
    """Samples per optimizer step over all GPUs."""
    learning_rate: Annotated[Number, Field(gt=0, le=10)] | None = None
    """Peak learning rate; chosen by method when not given."""
    weight_decay: Annotated[Number, Field(ge=0, le=10)] = 0.0
    """Decoupled weight decay."""
    warmup_ratio: Annotated[Number, Field(ge=0, le=1)] = 0.03
    """Share of the steps over which the learning rate rises."""
    max_grad_norm: Annotated[Number, Field(ge=0, le=10**6)] = 1.0
    """Norm that gradients are clipped to; 0 switches clipping off."""
    lr_scheduler: LrScheduler = LrScheduler.COSINE
    """Learning rate schedule, by its transformers name."""
    seed: Annotated[int, _count(2**32 - 1, least=0)] = 42
    """Seed of every random number."""
    save_steps: StepsOrOff | None = None
    """Optimizer steps between checkpoints; 0 switches saving off; once per epoch or about every hour when not given."""
    eval_steps: StepsOrOff | None = None
    """Optimizer steps between evaluations; 0 switches them off; needs `data.eval`."""
    logging_steps: Steps = 10
    """Optimizer steps between log lines."""
    save_total_limit: Annotated[int, _count(10_000)] = 2
    """Checkpoints kept."""
    output_dir: Text = "checkpoints"
    """Folder of the checkpoints."""
    trust_remote_code: Flag = False
    """Whether Python code that comes with the model may run."""


class Hardware(Section):
    """The machines."""

    gpu: Text = Field(examples=["rtx-4090"])
    """Name of the GPU, as `memc gpus` lists it."""
    count: Annotated[int, _count(1024)] = 1
    """GPUs per node."""
    nodes: Annotated[int, _count(10_000)] = 1
    """Number of nodes."""
    host_memory: SizeField | None = None
    """Memory of one node, needed for offload to the CPU."""
    nvme: SizeField | None = None
    """Free NVMe space of one node, needed for offload to NVMe."""
    nvme_path: Text = "/local_nvme"
    """Folder on that drive, on every node."""
    file: Text | None = None
    """File of figures measured on such a machine, as memc probe writes it; they take the place of the catalogue's."""
    network_gbit_per_second: Annotated[Number, Field(gt=0, le=100_000)] | None = None
    """What one node sends to the others, all its adapters together: 10 for 10 GbE, 3200 for eight of 400 Gb/s."""
    usd_per_gpu_hour: Annotated[Number, Field(ge=0, le=10_000)] | None = None
    """Price of one GPU for one hour; the catalogue's when not given."""

    @property
    def network_bytes_per_second(self) -> float | None:
        """What the network could carry of one GPU's traffic to other nodes; None when the spec does not say."""
        gbit = self.network_gbit_per_second
        return None if gbit is None else gbit * 1e9 / 8 / self.count


class Memory(Section):
    """What of the GPU may be used."""

    target: SizeOrAuto = None
    """Memory of each GPU that the run may use; auto is capacity minus reserve."""
    reserve: SizeField | None = None
    """Kept free when the target is auto; chosen by memc when not given."""


class Launch(Section):
    """How the run is started."""

    scheduler: Scheduler = Scheduler.NONE
    """What starts it on the machines: none (by hand), slurm, skypilot or kubernetes."""
    time_limit: Annotated[int, _count(24 * 366)] | None = None
    """Hours after which the scheduler may end the run."""
    partition: Line | None = None
    """Slurm: partition to submit to."""
    account: Line | None = None
    """Slurm: account to charge."""
    image: Line | None = None
    """Kubernetes and SkyPilot: container image; requirements.txt is installed into it when the run starts."""
    volume: Line | None = None
    """Kubernetes: claim of the volume with data and checkpoints; the run starts in it, mounted at /workspace."""
    accelerator: Line | None = None
    """SkyPilot: what it calls the card, as `sky gpus list` shows it, for example H100."""


class Libraries(Section):
    """Releases that the run will have, where they are not the ones memc plans with."""

    torch: Version | None = None
    """Release of PyTorch."""
    transformers: Version | None = None
    """Release of transformers: names of arguments follow it."""
    accelerate: Version | None = None
    """Release of accelerate."""
    peft: Version | None = None
    """Release of PEFT."""
    trl: Version | None = None
    """Release of TRL."""
    deepspeed: Version | None = None
    """Release of DeepSpeed: what is broken in it is refused or not chosen."""
    bitsandbytes: Version | None = None
    """Release of bitsandbytes."""
    datasets: Version | None = None
    """Release of datasets."""

    @property
    def named(self) -> dict[str, str]:
        """Returns the releases that are given, by package."""
        return {name: version for name, version in self if version is not None}


class Time(Section):
    """How long or dear the run may be."""

    budget: RunLimitField = None
    """Wall clock (24h), money ($40), or none."""


class Ladder(Section):
    """Techniques that are ruled out or asked for, by name."""

    forbid: Names = ()
    """Techniques that may not be used."""
    require: Names = ()
    """Techniques that must be used."""


class Pin(Section):
    """Choices of the plan that are fixed rather than solved for."""

    precision: Precision | None = None
    """Data type of matrix products: bf16, fp16, fp32 or bf16_pure."""
    engine: Engine | None = None
    """Who runs the step: single, ddp, deepspeed or fsdp."""
    micro_batch_size: Annotated[int, _count(2**20)] | None = None
    """Samples per GPU in one forward pass."""
    gradient_accumulation_steps: Annotated[int, _count(2**24)] | None = None
    """Forward passes per optimizer step."""
    activation_checkpointing: CheckpointEvery | None = None
    """false or 0 keeps all activations, true or 1 recomputes every layer, k every k-th layer."""
    attention: Attention | None = None
    """Attention implementation: sdpa, eager or flash_attention_2."""
    loss: LossHead | None = None
    """plain materialises all logits, chunked computes the loss in tiles."""
    reference: ReferencePlace | None = None
    """Preference training of all weights: model keeps a frozen second one, precomputed scores all pairs once ahead."""
    optimizer: Optimizer | None = None
    """Optimizer, by its transformers name."""
    zero_stage: Annotated[int, _count(3, least=0)] | None = None
    """DeepSpeed ZeRO stage, 0 to 3."""
    offload_optimizer: Offload | None = None
    """Where optimizer states live: none, cpu or nvme; nvme needs ZeRO stage 3."""
    offload_param: Offload | None = None
    """Where 16-bit parameters live: none, cpu or nvme; both need ZeRO stage 3, cpu also goes with FSDP."""
    hybrid_sharding: Flag | None = None
    """Whether weights are gathered within a node: FSDP replicates across nodes, ZeRO-3 keeps a second copy."""
    bf16_master_weights: Flag | None = None
    """DeepSpeed: whether master weights and reduced gradients are bf16."""
    bf16_optimizer_states: Flag | None = None
    """DeepSpeed: whether Adam's moments are bf16; needs `bf16_master_weights`."""
    fsdp_version: Annotated[int, _count(2)] | None = None
    """FSDP: 2 shards each parameter; 1 is the older kind, which memc prices and does not write."""
    reshard_after_forward: Flag | None = None
    """FSDP: whether a layer's weights are freed between its forward and its backward."""
    reduce_each_micro_batch: Flag | None = None
    """FSDP: whether gradients are reduced after every micro-batch, so that only shards accumulate."""
    sharded_checkpoints: Flag | None = None
    """FSDP: whether checkpoints hold one file per rank rather than whole tensors."""
    checkpoint_offload: Flag | None = None
    """Whether what activation checkpointing keeps of each layer waits in host memory."""
    context_parallel: Annotated[int, _count(1024)] | None = None
    """GPUs that share each sequence; 1 gives every GPU whole sequences."""
    lora_rank: Annotated[int, _count(65_536)] | None = None
    """Inner dimension of each adapter pair."""
    lora_alpha: Annotated[int, _count(2**20)] | None = None
    """Scale numerator of the adapters."""
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] | None = None
    """Dropout probability on the adapter input."""
    target_modules: TargetModules | None = None
    """Modules that carry an adapter: attention, all-linear, or a list of module names."""
    adapter_precision: AdapterPrecision | None = None
    """Data type of the adapters: fp32 or base."""
    expandable_segments: Flag | None = None
    """Whether torch's caching allocator uses expandable segments."""
    gradient_as_bucket_view: Flag | None = None
    """Whether DistributedDataParallel's buckets are the gradients themselves."""
    double_quantization: Flag | None = None
    """Whether the quantisation constants of a 4-bit base are quantised too."""
    eval_batch_size: Annotated[int, _count(2**20)] | None = None
    """Samples per GPU in evaluation."""
    overlap_comm: Flag | None = None
    """DeepSpeed: whether gradient reduction overlaps with backward, at the price of a second bucket."""
    reduce_bucket_size: Elements | None = None
    """DeepSpeed: elements per reduction."""
    allgather_bucket_size: Elements | None = None
    """DeepSpeed stages 1 and 2: elements per gathering."""
    prefetch_bucket_size: Elements | None = None
    """DeepSpeed stage 3: elements fetched ahead."""
    param_persistence_threshold: Elements | None = None
    """DeepSpeed stage 3: parameters below this many elements stay on every GPU."""
    max_live_parameters: Elements | None = None
    """DeepSpeed stage 3: elements that may be gathered at the same time."""
    sub_group_size: Elements | None = None
    """DeepSpeed stage 3: elements per optimizer step of a group."""
    padding_mask: Flag | None = None
    """Whether an attention mask reaches the attention kernel."""


class Spec(Section):
    """What the user asks for. Frozen; optional fields are decided by the solver."""

    model: Text = Field(examples=["Qwen/Qwen2.5-7B-Instruct"])
    """Model: a catalogue key, a hub id, a folder or a config.json."""
    task: Task = Task.SFT
    """What is trained: sft (instruction data), pretrain (plain text), dpo (pairs of answers) or classification."""
    data: Data = Field(examples=["{train: data/train.jsonl, max_length: 2048}"])
    """What is trained on."""
    method: Methods = ()
    """Which parameters train: auto, full, lora, qlora, or a list in order of preference."""
    lora: Lora = Lora.model_construct()
    """Low-rank adapters, where the method uses them."""
    dpo: Dpo = Dpo.model_construct()
    """The loss of preference training, where the task is dpo."""
    training: Training = Training.model_construct(epochs=DEFAULT_EPOCHS)
    """Hyper-parameters and cadence."""
    hardware: Hardware = Field(examples=["{gpu: rtx-4090}"])
    """The machines."""
    memory: Memory = Memory.model_construct()
    """What of the GPU may be used."""
    time: Time = Time.model_construct()
    """How long or dear the run may be."""
    launch: Launch = Launch.model_construct()
    """How the run is started."""
    libraries: Libraries = Libraries.model_construct()
    """Releases of libraries that the run will have; those memc plans with when not given."""
    objective: Objective = Objective.LOWEST_RUNG
    """What is preferred among the plans that fit: lowest-rung, fastest or cheapest."""
    ladder: Ladder = Ladder.model_construct()
    """Techniques that are ruled out or asked for."""
    pin: Pin = Pin.model_construct()
    """Choices of the plan that are fixed rather than solved for."""

    @model_validator(mode="before")
    @classmethod
    def _epochs_when_nothing_decides(cls, value: Any) -> Any:
        """Returns the input with `training.epochs` filled in when neither it nor `max_steps` is there."""
        training = value.get("training", {}) if isinstance(value, dict) else None
        if isinstance(training, dict) and training.get("epochs") is None and training.get("max_steps") is None:
            return {**value, "training": {**training, "epochs": DEFAULT_EPOCHS}}
        return value

    @property
    def methods(self) -> tuple[Method, ...]:
        """Methods that may be used, preferred first; full, lora, qlora for auto."""
        return self.method or tuple(Method)

    @property
    def world_size(self) -> int:
        """GPUs over all nodes."""
        return self.hardware.count * self.hardware.nodes

    @property
    def data_parallel_ranks(self) -> int:
        """GPUs that see different samples; groups of GPUs where a pin lets several share each sequence."""
        return max(1, self.world_size // (self.pin.context_parallel or 1))

    def resolved(self) -> dict[str, Any]:
        """Returns every field with its value or default, JSON-ready, units as they were written."""
        return self.model_dump(mode="json")

    def canonical_json(self) -> str:
        """Returns the resolved spec on one line: keys sorted, units in bytes and seconds, undecided fields left out."""
        values = self.model_dump(mode="json", exclude_none=True, context=CANONICAL)
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """Returns the SHA-256 of `canonical_json` in hex: the same for any spelling of the same spec."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()
