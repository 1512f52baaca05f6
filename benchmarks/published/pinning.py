"""A record as a pinned configuration: every choice that the ledger needs, or the reason why there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memc.config import (
    AdapterPrecision,
    Engine,
    FsdpConfig,
    LoraConfig,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Quantization,
    Task,
    TrainingConfig,
    ZeroConfig,
)
from memc.errors import MemcError
from memc.facts import GpuFacts, ModelFacts, default_lora_targets, load_fact, load_gpu

from published.kernels import as_litgpt, with_kernels, with_older_softmax, with_prefixes
from published.models import read_model
from published.readings import (
    Sharding,
    is_prefix_adapter,
    read_attention,
    read_checkpointing,
    read_lora,
    read_method,
    read_offload,
    read_optimizer,
    read_precision,
    read_quantization,
    read_shape,
    read_sharding,
)
from published.records import Record, Skip
from published.stacks import Software, for_family, read_software


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """What a record ran, as the ledger takes it."""

    model: ModelFacts
    gpu: GpuFacts
    config: TrainingConfig
    software: Software


def pin(record: Record) -> Pinned:
    """Returns the configuration that a record ran.

    Raises:
        Skip: When a choice that decides memory is unknown, or one that memc does not know.
    """
    method = read_method(record)
    software = read_software(record)
    model = read_model(record)
    model = _modelled(model, software)
    prefix = is_prefix_adapter(record)
    model = with_prefixes(model) if prefix else model
    sharding = read_sharding(record)
    optimizer_offload, param_offload = read_offload(record)
    precision, base = read_precision(record, method)
    micro_batch, length = read_shape(record)
    gpus, nodes = _cards(record, sharding)
    checkpoint_every = read_checkpointing(record)
    autocast = precision in (Precision.BF16, Precision.FP16)
    software = for_family(software, model.model_type, autocast=autocast, checkpointed=checkpoint_every > 0)
    quantization, double = Quantization.NF4, True
    if method is Method.QLORA:
        quantization, double = read_quantization(record)
        double = double or bool(software.double_quantization)
    config = TrainingConfig(
        task=Task.SFT,
        method=method,
        precision=precision,
        engine=sharding.engine,
        gpus_per_node=gpus,
        nodes=nodes,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=_accumulation(record, sharding, software),
        max_length=length,
        packing=bool(record.fields.get("packing")),
        padding_mask=False,
        attention=read_attention(record),
        loss=LossHead.PLAIN,
        checkpoint_every=checkpoint_every,
        optimizer=_optimizer(record, software),
        lora=_PREFIX if prefix else None if method is Method.FULL else _lora(record, model, software, precision),
        zero=_zero(sharding, (optimizer_offload, param_offload), model, software),
        eval_batch_size=0,
        expandable_segments=False,
        gradient_as_bucket_view=False,
        double_quantization=double,
        fsdp=_fsdp(sharding, param_offload, software),
        base_precision=base,
        quantization=quantization,
        upcast_unquantized=_upcasts(record, method, sharding),
        reentrant_checkpointing=checkpoint_every > 0 and _reentrant(record, software),
    )
    return Pinned(model=model, gpu=read_gpu(record), config=config, software=software)


_PREFIX = LoraConfig(rank=1, alpha=1, dropout=0.0, target_modules=(), precision=AdapterPrecision.BASE)
"""No linear carries an adapter; the prefixes are in the programs of the layers."""


def _modelled(model: ModelFacts, software: Software) -> ModelFacts:
    """Returns the model as the program of a record builds and runs it.

    Raises:
        Skip: When the layers of its family are not described as a program.
    """
    if software.modelling == "litgpt":
        return as_litgpt(model)
    if not all(group.block.forward for group in model.groups):
        raise Skip(f"the layers of family {model.model_type} are not described as a program")
    model = with_older_softmax(model) if software.softmax_keeps_input else model
    return with_kernels(model, software.stack)


def read_gpu(record: Record) -> GpuFacts:
    """Returns the card that a record names; of several cards of one name, that of the size it names.

    Raises:
        Skip: When the card is not said or not known.
    """
    text = str(record.fields.get("gpu") or "").strip()
    if not text:
        raise Skip("the card is not said")
    plain = re.sub(r"\(.*?\)|\bhbm\w*\b", "", text, flags=re.IGNORECASE).strip()
    size = record.whole("gpu_mem_gb")
    names = [text, plain]
    for family, forms in _FORMS.items():
        if re.match(rf"(nvidia )?{family}\b", plain, re.IGNORECASE):
            names += [form.format(size=size) for form in forms]
    for name in names:
        try:
            return load_gpu(name)
        except MemcError:
            continue
    raise Skip(f"the card {plain} is not known")


_FORMS: dict[str, Sequence[str]] = {
    "a100": ("a100-sxm4-{size}gb", "a100-sxm4-80gb"),
    "h100": ("h100-sxm5-80gb",),
    "h200": ("h200-sxm-141gb",),
    "h800": ("h100-sxm5-80gb",),
    "b200": ("b200-180gb",),
    "v100": ("v100-sxm2-{size}gb",),
    "rtx a5000": ("rtx-a5000",),
    "rtx 3090": ("rtx-3090",),
    "rtx 4070 ti super": ("rtx-4070-ti-super",),
}


def _cards(record: Record, sharding: Sharding) -> tuple[int, int]:
    """Returns cards per node and nodes; FSDP over fewer ranks than there are cards counts those ranks."""
    ranks = record.whole("n_gpus") or 1
    if sharding.ranks is not None and sharding.engine is Engine.FSDP:
        ranks = sharding.ranks
    nodes = record.whole("n_nodes") or 1
    if ranks % nodes:
        nodes = 1
    return max(1, ranks // nodes), nodes


def _lora(record: Record, model: ModelFacts, software: Software, precision: Precision) -> LoraConfig:
    rank, alpha, dropout, targets = read_lora(record)
    own = software.adapters or ("fp32" if precision is not Precision.BF16_PURE else "base")
    return LoraConfig(
        rank=rank,
        alpha=int(alpha),
        dropout=dropout,
        target_modules=match_targets(model, targets),
        precision=AdapterPrecision.FP32 if own == "fp32" else AdapterPrecision.BASE,
    )


def match_targets(model: ModelFacts, targets: object) -> tuple[str, ...]:
    """Returns the linears of a model that the words, names or pattern of a record mean.

    Raises:
        Skip: When they name no linear of the model.
    """
    names = model.linear_names()
    if isinstance(targets, list | tuple):
        chosen = tuple(name for name in names if name in {str(target) for target in targets})
    else:
        text = str(targets).casefold()
        if "all" in text and "linear" in text:
            return default_lora_targets(model, "all-linear")
        if re.fullmatch(r"[qkvo](_proj)?(\s*,\s*[qkvo](_proj)?)*", text):
            letters = {part.strip()[0] for part in text.split(",")}
            chosen = tuple(name for name in names if name.removesuffix("_proj") in letters)
            chosen = chosen or tuple(name for name in names if name in _FUSED_QKV)
        else:
            words = set(re.findall(r"[a-z]+", text))
            chosen = tuple(name for name in names if set(name.split("_")) - {"proj"} <= words)
    if not chosen:
        raise Skip("the adapters' targets are no linears of the model")
    return chosen


_FUSED_QKV = ("query_key_value", "c_attn", "qkv_proj", "Wqkv")


def _zero(
    sharding: Sharding, offload: tuple[Offload, Offload], model: ModelFacts, software: Software
) -> ZeroConfig | None:
    """Returns ZeRO settings: DeepSpeed's defaults, or what transformers fills in for stage 3 where it runs it."""
    if sharding.engine is not Engine.DEEPSPEED:
        return None
    hidden, third = model.hidden_size, sharding.stage == 3
    fills = third and not software.plain_deepspeed
    return ZeroConfig(
        stage=sharding.stage,
        offload_optimizer=offload[0],
        offload_param=offload[1] if third else Offload.NONE,
        reduce_bucket_elements=hidden * hidden if fills else _fact("deepspeed.reduce_bucket_elements"),
        allgather_bucket_elements=_fact("deepspeed.allgather_bucket_elements"),
        prefetch_elements=int(0.9 * hidden * hidden) if fills else _fact("deepspeed.prefetch_elements"),
        persistence_elements=10 * hidden if fills else _fact("deepspeed.persistence_elements"),
        max_live_elements=_fact("deepspeed.max_live_elements"),
        sub_group_elements=_fact("deepspeed.sub_group_elements"),
        overlap_comm=False,
        partitioned_at_load=software.partitions_at_load,
    )


def _fact(key: str) -> int:
    return int(load_fact(key).value)


def _fsdp(sharding: Sharding, offload: Offload, software: Software) -> FsdpConfig | None:
    if sharding.engine is not Engine.FSDP:
        return None
    return FsdpConfig(
        version=sharding.fsdp,
        offload=offload,
        loads_by_layer=False,  # from_pretrained as it is puts a 4-bit base whole on every GPU
        mixed_units=software.mixed_units,
        reduce_fp32=software.reduce_fp32,
        reduce_each_micro_batch=software.reduces_each_micro_batch,
        backward_prefetch=sharding.prefetch,
    )


def _optimizer(record: Record, software: Software) -> Optimizer:
    """Returns the optimizer; torch works on lists of tensors by default since 2.0."""
    optimizer = read_optimizer(record)
    return Optimizer.ADAMW if software.torch_1 and optimizer is Optimizer.ADAMW_FOREACH else optimizer


def _accumulation(record: Record, sharding: Sharding, software: Software) -> int:
    """Returns the micro batches of a step; gradients that are only set to zero live as while several accumulate."""
    steps = max(1, record.whole("grad_accum") or 1)
    return max(2, steps) if software.torch_1 and sharding.engine in (Engine.SINGLE, Engine.DDP) else steps


def _upcasts(record: Record, method: Method, sharding: Sharding) -> bool:
    """Returns whether what a 4-bit base leaves is cast to fp32, as PEFT advises and TRL does but for a sharded base."""
    if method is not Method.QLORA or sharding.engine is Engine.FSDP:
        return False
    text = record.text("fused_kernels")
    return "prepare_model_for_kbit" in text and not re.search(r"no prepare|unsloth", text)


def _reentrant(record: Record, software: Software) -> bool:
    """Returns whether checkpointing is reentrant: said so, or transformers' default before version 5."""
    text = record.text("gradient_checkpointing")
    if "reentrant" in text or "re-entrant" in text:
        return not re.search(r"non-?re", text)
    version = software.transformers
    return version is not None and version < (5,) and "hf" in record.text("framework")
