"""Reading rules: what the words of a published record mean as choices of a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from memc.config import (
    Attention,
    BasePrecision,
    Engine,
    Method,
    Offload,
    Optimizer,
    Precision,
    Quantization,
)

from published.records import Record, Skip, decimal_number, whole_number


class Metric(StrEnum):
    """What a figure counts: what tensors hold, what the allocator holds, or what the card shows as used."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"
    DEVICE = "device"


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How state is spread over the ranks.

    Attributes:
        engine: Who runs the step.
        stage: ZeRO stage; 0 without.
        fsdp: FSDP version; 0 without.
        ranks: Ranks that one copy is spread over; None when not said (all of them).
        prefetch: Whether the next layer is gathered during backward of the current one.
    """

    engine: Engine
    stage: int = 0
    fsdp: int = 0
    ranks: int | None = None
    prefetch: bool = True


def read_metric(record: Record) -> Metric:
    """Returns what the figure counts.

    Raises:
        Skip: When the source does not say, or counts something else.
    """
    text = record.text("metric")
    if not text or text.startswith("unspecified"):
        raise Skip("the source does not say what its figure counts")
    if "total over gpus" in text or not record.fields.get("per_gpu", True):
        raise Skip("the figure is a sum over GPUs")
    if "reserved" in text:
        return Metric.RESERVED
    if "alloc" in text:
        return Metric.ALLOCATED
    if "nvml" in text or "nvidia-smi" in text or "device used" in text:
        return Metric.DEVICE
    raise Skip("the source does not say what its figure counts")


def read_method(record: Record) -> Method:
    """Returns which parameters train.

    Raises:
        Skip: For a training method that memc does not know.
    """
    text = record.text("method")
    head = re.sub(r"\(.*?\)", "", text).strip()
    aside = " ".join(re.findall(r"\((.*?)\)", text))
    if head.startswith("op-level"):
        raise Skip("a single operation rather than a training run")
    if is_prefix_adapter(record):
        return Method.QLORA if "on nf4" in head else Method.LORA
    if re.search(r"ppo|dpo|kto|orpo|simpo|\brm\b|reward|galore|badam|mezo|zeroth|adapter|none|8-bit base", text):
        raise Skip(f"training method {head or 'unknown'}{f' ({aside})' if aside else ''}")
    if head.startswith("qlora"):
        return Method.QLORA
    if head.startswith("lora"):
        return (
            Method.QLORA if re.search(r"\b(nf4|4bit|4-bit|gptq|int4)\b", record.text("weight_dtype")) else Method.LORA
        )
    if head.startswith("full"):
        return Method.FULL
    raise Skip("the training method is not said" if not text else f"training method {text}")


def is_prefix_adapter(record: Record) -> bool:
    """Returns whether LitGPT's first adapter trains: a prefix that the layers attend to."""
    text = record.text("method")
    return bool(re.fullmatch(r"adapter( on nf4)?", text)) and record.text("framework").startswith("litgpt")


def read_quantization(record: Record) -> tuple[Quantization, bool]:
    """Returns the format of a 4-bit base and whether its constants are quantised too.

    Raises:
        Skip: For a format that memc does not know.
    """
    text = record.text("weight_dtype")
    if "gptq" in text:
        return Quantization.GPTQ, False
    if re.search(r"nvfp4|mxfp4|hqq|awq|aqlm|int8|8-bit|2-bit", text):
        raise Skip(f"a base quantised as {text.split()[0]}")
    if re.search(r"nf4|fp4|4bit|4-bit", text):
        return Quantization.NF4, bool(re.search(r"-dq|double|nested", text))
    raise Skip("the format of the quantised base is not said")


def read_precision(record: Record, method: Method) -> tuple[Precision, BasePrecision]:
    """Returns the data type of products and that of the loaded weights.

    Raises:
        Skip: When neither field says it, or it is a narrow format.
    """
    mixed, weights = record.text("mixed_precision"), record.text("weight_dtype")
    if re.search(r"fp8|float8|mx\b|mxfp|nvfp|int8 w", mixed + " " + weights) or "int8" in weights:
        raise Skip("8-bit or narrower products or weights")
    if re.search(r"32-true|\bfp32\)|none \(fp32", mixed) or mixed == "fp32":
        return Precision.FP32, BasePrecision.SCRIPT
    half = Precision.FP16 if re.search(r"fp16", mixed) and "bf16" not in mixed else Precision.BF16
    if re.search(r"\bpure\b|16-true|flags unset|lora params bf16|train.py precision bf16", mixed):
        return Precision.BF16_PURE, BasePrecision.HALF
    if "bf16" in mixed or "fp16" in mixed or "amp" in mixed:
        if method is Method.FULL and re.match(r"bf16|fp16|bfloat16|float16", weights):
            return half, BasePrecision.HALF
        if method is Method.FULL and re.match(r"fp32", weights):
            return half, BasePrecision.FP32
        if method is not Method.FULL and re.match(r"fp32", weights):
            return half, BasePrecision.FP32
        return half, BasePrecision.SCRIPT
    raise Skip("neither weights nor products have a known data type")


_OPTIMIZERS: tuple[tuple[str, Optimizer], ...] = (
    (r"paged.*(8bit|8-bit)", Optimizer.PAGED_ADAMW_8BIT),
    (r"paged", Optimizer.PAGED_ADAMW),
    (r"galore|badam|mezo|sgd|adafactor|lion|sophia|muon|shampoo|4-bit|4bit|fp8|offload|disabled", Optimizer.ADAMW),
    (r"adamw?[ _]?(bnb[ _])?(8bit|8-bit)|8-bit adam|bnb 8-bit|adam8bit|adamw8bit", Optimizer.ADAMW_8BIT),
    (r"fused", Optimizer.ADAMW),
    (r"adam", Optimizer.ADAMW_FOREACH),
)
_OTHER_OPTIMIZER = re.compile(
    r"galore|badam|mezo|sgd|adafactor|lion|sophia|muon|shampoo|4-bit|4bit|fp8|disabled|offload \d"
)


def read_optimizer(record: Record) -> Optimizer:
    """Returns the optimizer. AdamW without a word about its implementation is torch's default, foreach.

    Raises:
        Skip: For an optimizer that memc does not know, or when none is said.
    """
    text = record.text("optimizer")
    if not text:
        raise Skip("the optimizer is not said")
    if found := _OTHER_OPTIMIZER.search(text):
        raise Skip(f"optimizer {found.group(0)}")
    for pattern, optimizer in _OPTIMIZERS:
        if re.search(pattern, text):
            return optimizer
    raise Skip(f"optimizer {text}")


def read_checkpointing(record: Record) -> int:
    """Returns every how many layers activations are recomputed; 0 for none.

    Raises:
        Skip: When it is not said, or only some operations are recomputed.
    """
    text = record.text("gradient_checkpointing")
    if not text:
        raise Skip("activation checkpointing is not said")
    if text.startswith(("none", "false", "no", "off")):
        return 0
    if found := re.search(r"every (\d+)(st|nd|rd|th)? layer", text):
        return int(found.group(1))
    if text.startswith(("full", "true", "on", "yes")):
        return 1
    if text.startswith("selective"):
        raise Skip("operations are recomputed selectively, by a rule that is not said")
    raise Skip(f"activation checkpointing {text}")


def read_attention(record: Record) -> Attention:
    """Returns the attention kernel; what keeps scores is eager, what does not is flash or SDPA.

    Raises:
        Skip: When it is not said.
    """
    text = record.text("attention")
    if re.search(r"flash|fa2|fa3|xformers|mem.*efficient", text):
        return Attention.FLASH_ATTENTION_2
    if "sdpa" in text or text.startswith("fused"):
        return Attention.SDPA
    if re.search(r"eager|unfused|math|torch", text):
        return Attention.EAGER
    raise Skip("the attention kernel is not said" if not text else f"attention {text}")


def read_sharding(record: Record) -> Sharding:
    """Returns how state is spread.

    Raises:
        Skip: For tensor, pipeline, expert or sequence parallelism and engines that memc does not know.
    """
    text, ranks = record.text("sharding"), record.whole("n_gpus") or 1
    parallel = record.mapping("parallelism")
    for axis in ("tp", "pp", "cp", "ep", "sequence_parallel", "sp"):
        size = parallel.get(axis)
        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
            raise Skip(f"{_AXES[axis]} parallelism")
    if re.search(r"tp ?[2-9]|pp ?[2-9]|\bep ?\d", text):
        raise Skip("tensor parallelism")
    if "megatron" in text or "megatron" in record.text("framework"):
        raise Skip("Megatron-LM's own model, optimizer and buffers")
    if re.search(r"gemini|low_level_zero|colossal|device_map|transformer kernel", text) or "colossal" in record.text(
        "framework"
    ):
        raise Skip(
            "ColossalAI's or another engine's own sharding" if "device_map" not in text else "layers split over cards"
        )
    if "fsdp" in text or "fully_shard" in text:
        return _read_fsdp(text, ranks)
    if found := re.search(r"zero[-_ ]?([123])", text):
        return Sharding(engine=Engine.DEEPSPEED, stage=int(found.group(1)))
    if record.is_none("sharding") or text.startswith(("none", "ddp", "pytorch", "nothing")):
        return Sharding(engine=Engine.SINGLE if ranks == 1 else Engine.DDP)
    raise Skip(f"sharding {text}")


_AXES = {
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "sequence_parallel": "sequence",
    "sp": "sequence",
}


def _read_fsdp(text: str, ranks: int) -> Sharding:
    """Returns FSDP's settings: version 1 unless it says 2, all ranks unless a number follows."""
    if "no_shard" in text:
        return Sharding(engine=Engine.DDP)
    if re.search(r"shard_grad_op|hybrid|_op\b", text):
        raise Skip("an FSDP strategy other than full sharding")
    version = 2 if re.search(r"fsdp ?2|fully_shard", text) else 1
    own = re.search(r"fsdp[12] (\d+)", text)
    return Sharding(
        engine=Engine.FSDP,
        fsdp=version,
        ranks=int(own.group(1)) if own else ranks,
        prefetch="backward_post" not in text,
    )


def read_offload(record: Record) -> tuple[Offload, Offload]:
    """Returns where optimizer and parameters live.

    Raises:
        Skip: For an offload of something else, or of a part.
    """
    text = record.text("offload")
    if record.is_none("offload") and "offload" not in record.text("sharding").replace("offload_params=false", ""):
        return Offload.NONE, Offload.NONE
    if re.search(r"activations|\d+%|blocks|torchao|zero-offload|disabled", text):
        raise Skip(f"offload of {text.lstrip('; ')}")
    if re.search(r"params", text + record.text("sharding")):
        return Offload.CPU, Offload.CPU
    if "nvme" in text:
        raise Skip("offload to NVMe")
    if "optim" in text:
        return Offload.CPU, Offload.NONE
    if text.startswith(("cpu", "fsdp cpu")):
        return Offload.CPU, Offload.CPU
    raise Skip(f"offload {text or 'unknown'}")


def read_shape(record: Record) -> tuple[int, int]:
    """Returns samples per micro-batch and tokens per sample, when every sample has that many.

    Raises:
        Skip: When either is unknown, or the length is only an upper limit.
    """
    batch, length = record.whole("micro_batch"), record.whole("seq_len")
    if not batch:
        raise Skip("the micro-batch is not said")
    if not length:
        raise Skip("the sequence length is not said")
    kind = record.text("seq_len_kind")
    if re.search(r"cap|dynamic|short text|max input|mean|varies", kind):
        raise Skip("the sequence length is only a limit; samples are shorter")
    if "split over" in kind or "global length" in kind:
        raise Skip("sequence parallelism")
    return batch, length


def read_lora(record: Record) -> tuple[int, float, float, object]:
    """Returns rank, alpha, dropout and targets (a list of names, a pattern, or words) of the adapters.

    Raises:
        Skip: When rank or targets are unknown.
    """
    lora = record.mapping("lora")
    rank = whole_number(lora.get("rank", lora.get("r")))
    targets = lora.get("targets", lora.get("target_modules"))
    if not rank or not targets:
        raise Skip("rank or targets of the adapters are not said")
    alpha = decimal_number(lora.get("alpha", lora.get("lora_alpha"))) or float(rank)
    dropout = decimal_number(lora.get("dropout", lora.get("lora_dropout")))
    if dropout is None:
        raise Skip("the adapters' dropout is not said")
    return rank, alpha, dropout, targets
