"""What the words of a record mean: kernels, attention, checkpointing, sharding, parallelism, offload."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memc.clock.workload import AttentionKernel, Kernels, Sharding
from memc.config import Offload

from timed.reading import UnreadableError


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of parallelism; `data` is None when the record leaves it to the number of GPUs."""

    data: int | None
    tensor: int
    stages: int
    context: int


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How data parallelism divides state.

    Attributes:
        kind: What is divided.
        per_layer: Whether weights are gathered layer by layer.
        within_node: Whether a copy is shared inside a node only.
        reduces_fp32: Whether gradients are reduced in fp32.
        masters: Whether the optimizer keeps fp32 copies beside 16-bit weights.
    """

    kind: Sharding
    per_layer: bool
    within_node: bool
    reduces_fp32: bool
    masters: bool


def kernels_of(words: str) -> Kernels:
    """Returns who writes the kernels between products, from the `fused` field."""
    folded = words.casefold()
    if re.search(r"compil|thunder|reduce-overhead", folded) and not re.search(r"no compile|before compile", folded):
        return Kernels.COMPILED
    if re.search(r"foak|liger|unsloth|fused|triton|transformer ?engine|\bte\b", folded):
        return Kernels.FUSED
    return Kernels.EAGER


def fused_loss(words: str) -> bool:
    """Whether the loss is one kernel or chunked, from the `fused` field."""
    return bool(re.search(r"foak|liger|unsloth|\bce\b|cross.?entropy|triton", words.casefold()))


def attention_of(words: str, *, predates: bool) -> tuple[AttentionKernel, str]:
    """Returns the attention kernel, and a note when it was inferred.

    A kernel called flash without a version is the first. Where nothing is said, it is what torch picks, unless the code
    predates such kernels: then scores are in memory.
    """
    folded = words.casefold()
    if re.search(r"eager|math|naive|unfused", folded):
        return AttentionKernel.EAGER, ""
    if "block-sparse" in folded:
        raise UnreadableError("block-sparse attention")
    if re.search(r"flash.?(attn|attention)?.?3|\bfa3\b|cudnn", folded):
        return AttentionKernel.FLASH3, ""
    if re.search(r"2|sdpa|flex|xformers|fused", folded):
        return AttentionKernel.FLASH2, ""
    if "flash" in folded:
        return AttentionKernel.FLASH1, ""
    if not predates:
        return AttentionKernel.FLASH2, "attention not stated: a fused kernel"
    return AttentionKernel.EAGER, "attention not stated: scores in memory"


def recompute_of(words: str) -> tuple[float, float, bool] | None:
    """Returns the share of layers computed again, the share of their products, and whether attention is; None when
    the record does not say.

    Selective recipes save attention and every other product (per operation), or compute only attention again.
    """
    folded = words.casefold()
    if not folded or "default" in folded:
        return None
    if folded.startswith(("none", "no", "off", "false")):
        return 0.0, 0.0, False
    if "per-op" in folded:
        return 1.0, 0.5, False
    if "selective" in folded:
        return 1.0, 0.0, True
    return 1.0, 1.0, True


def parallel_of(words: str) -> Parallel:
    """Returns degrees of parallelism from words such as ``tp=8 pp=12 dp=4`` or ``FSDP8 TP8 PP8``."""
    folded = words.casefold()

    def degree(*names: str) -> int | None:
        for name in names:
            match = re.search(rf"(?<![a-z]){name}[ =]?(\d+)", folded)
            if match is not None:
                return max(1, int(match.group(1)))
        return None

    if re.search(r"\bep\d|\bep=", folded):
        raise UnreadableError("expert parallelism")
    tensor, stages, context = degree("tp"), degree("pp"), degree("cp")
    unnamed = re.search(r"\btp\b|tp\+|\+tp|/tp|megatron|\bsp\b|\bptd\b|3d", folded)
    if unnamed and not (tensor or stages or context):
        raise UnreadableError("degrees of tensor, pipeline or sequence parallelism not stated")
    return Parallel(data=degree("fsdp", "dp"), tensor=tensor or 1, stages=stages or 1, context=context or 1)


def shards_of(words: str, *, several: bool) -> Shards:
    """Returns what is sharded, from the `sharding` field."""
    folded = words.casefold()
    if re.search(r"hybrid|hsdp", folded):
        return _shards(Sharding.WEIGHTS, within_node=True)
    if "shard_grad_op" in folded:
        return _shards(Sharding.GRADIENTS, per_layer=True)
    if "infinity" in folded or re.search(r"zero.?3", folded):
        return _shards(Sharding.WEIGHTS, masters="fsdp" not in folded)
    if "fsdp" in folded:
        return _shards(Sharding.WEIGHTS, reduces_fp32="fsdp2" in folded)
    if re.search(r"zero.?2", folded):
        return _shards(Sharding.GRADIENTS, per_layer=False, masters=True)
    if re.search(r"zero.?1|distributed optimizer", folded):
        return _shards(Sharding.STATES, per_layer=False, masters=True)
    if "zero" in folded or ("megatron" in folded and "mp" in folded):
        raise UnreadableError("sharding not stated in full")
    if several and not re.search(r"ddp|none|^$", folded):
        raise UnreadableError(f"sharding {words!r} is not known")
    return _shards(Sharding.NONE, per_layer=False)


def _shards(
    kind: Sharding,
    *,
    per_layer: bool = True,
    within_node: bool = False,
    reduces_fp32: bool = False,
    masters: bool = False,
) -> Shards:
    return Shards(kind=kind, per_layer=per_layer, within_node=within_node, reduces_fp32=reduces_fp32, masters=masters)


def offload_of(words: str) -> tuple[Offload, Offload, bool]:
    """Returns where optimizer states and weights wait, and whether activations leave the card.

    Raises:
        UnreadableError: For schemes that memc does not write.
    """
    folded = words.casefold()
    if not folded or folded.startswith(("none", "0 %")) or "optimizer on gpu" in folded:
        return Offload.NONE, Offload.NONE, False
    if re.search(r"zenflow|partial|50 %|superoffload|experts|twin|compil|before/after", folded):
        raise UnreadableError(f"offload scheme {words!r}")
    if "nvme" in folded or "swap" in folded:
        return Offload.NVME, Offload.NVME, False
    activations = "activation" in folded
    weights = "param" in folded or folded == "cpu"
    states = bool(re.search(r"optimizer|grads", folded)) or folded == "cpu"
    cpu = Offload.CPU
    return cpu if states else Offload.NONE, cpu if weights else Offload.NONE, activations
