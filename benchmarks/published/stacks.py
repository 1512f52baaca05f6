"""What software a record ran: versions, and what follows from them and from the kernels it names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from memc.facts import load_fact
from memc.ledger.constants import CrossEntropy, Stack
from memc.units import MIB

from published.records import Record, Skip, read_yaml

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Software:
    """What ran.

    Attributes:
        name: Which entry of stacks.yaml it is; empty for none.
        transformers: Version of transformers; None when not known.
        stack: Behaviour that the ledger asks for.
        adapters: ``fp32`` or ``base``, the adapters' data type; None when the record must tell.
        double_quantization: Whether a 4-bit base's constants are quantised; None when the record must tell.
        modelling: ``litgpt`` where the program builds models itself; empty for transformers' models.
        mixed_units: Whether FSDP's flat parameters mix frozen and trained weights.
        reduces_each_micro_batch: Whether gradients are reduced after each micro-batch.
        reduce_fp32: Whether they are reduced in fp32.
        partitions_at_load: Whether ZeRO-3 cuts weights while they are loaded.
        counts_loading: Whether the counter of memory was not reset after loading.
        torch_1: Whether torch is older than 2.0: a step sets gradients to zero rather than let go of them, and
            optimizers work tensor by tensor.
        softmax_keeps_input: Whether torch is so old that softmax keeps what it read beside its result.
        context_bytes: CUDA context that the source states, or that kernels loaded at once need (torch before 2.0);
            None when the card's own figure stands.
        plain_deepspeed: Whether DeepSpeed runs with its own defaults rather than those that transformers fills in.
    """

    name: str
    transformers: tuple[int, ...] | None
    stack: Stack
    adapters: str | None
    double_quantization: bool | None
    modelling: str = ""
    mixed_units: bool = False
    reduces_each_micro_batch: bool = True
    reduce_fp32: bool = False
    partitions_at_load: bool = True
    counts_loading: bool = False
    plain_deepspeed: bool = False
    torch_1: bool = False
    softmax_keeps_input: bool = False
    context_bytes: int | None = None


def read_software(record: Record) -> Software:
    """Returns what a record ran.

    Raises:
        Skip: When kernels are named that the ledger does not know.
    """
    entry = _entry(record)
    versions = entry.get("versions", {})
    version = _version(str(versions.get("transformers", ""))) or _stated_version(record, "transformers")
    torch = _version(str(versions.get("torch", ""))) or _stated_version(record, "torch")
    return Software(
        name=str(entry.get("name", "")),
        transformers=version,
        stack=_stack(record, entry, version),
        adapters=entry.get("adapters"),
        double_quantization=entry.get("double_quantization"),
        modelling=str(entry.get("modelling", "")),
        mixed_units=bool(entry.get("mixed_units", False)),
        reduce_fp32=bool(entry.get("reduce_fp32", False)),
        partitions_at_load=bool(entry.get("partitions_at_load", True)),
        counts_loading=bool(entry.get("counts_loading", False)),
        plain_deepspeed=bool(entry.get("plain_deepspeed", False)),
        torch_1=torch is not None and torch < (2,),
        softmax_keeps_input=_before(torch, "torch.softmax_keeps_result_alone_since"),
        context_bytes=_stated_context(record, torch),
        reduces_each_micro_batch=bool(entry.get("reduces_each_micro_batch", True)),
    )


def for_family(software: Software, model_type: str, *, autocast: bool, checkpointed: bool) -> Software:
    """Returns the software with what its version of transformers does for a model family.

    Args:
        software: What ran.
        model_type: The family.
        autocast: Whether the loss runs under autocast, in fp32 whatever the model hands it.
        checkpointed: Whether layers are.
    """
    padded = _version(str(load_fact("transformers.labels_padded_since").value))
    if software.transformers is None or padded is None or software.transformers >= padded:
        return software
    stack = software.stack
    if model_type in str(load_fact("transformers.families_with_16bit_loss").value).split():
        stack = replace(stack, narrow_shift=True) if autocast else replace(stack, logits_upcast=False)
    if checkpointed and model_type in str(load_fact("transformers.families_caching_under_checkpointing").value).split():
        stack = replace(stack, keeps_keys=True)
    return replace(software, stack=stack)


def _stack(record: Record, entry: Mapping[str, Any], version: tuple[int, ...] | None) -> Stack:
    """Returns behaviour by the kernels that a record names, else by its program, else by the version."""
    kernels = record.text("fused_kernels")
    if found := re.search(r"async tp|kernelsplugin|flex|megatron", kernels):
        raise Skip(f"kernels that memc does not know: {found.group(0)}")
    checkpointed = record.text("gradient_checkpointing").startswith(("full", "true"))
    if re.search(r"\bcompile\b|float8", kernels) and not checkpointed:
        raise Skip("torch.compile or float8 products decide what layers keep")  # a checkpointed layer keeps its input
    fused = bool(re.search(r"triton fused|rmsnorm|liger|unsloth", kernels))
    cross = CrossEntropy(entry.get("cross_entropy", "torch"))
    if re.search(r"linear cross|fused linear|cutcross|cut cross|\bliger\b(?! fused)", kernels):
        cross = CrossEntropy.LINEAR
    elif re.search(r"fused ce\b|fused cross", kernels):
        cross = CrossEntropy.IN_PLACE
    return Stack(
        cross_entropy=cross,
        logits_upcast=bool(entry.get("logits_upcast", True)),
        logits_kept=bool(entry.get("logits_kept", not _before(version, "transformers.logits_kept_since"))),
        logits_stay=bool(entry.get("logits_stay", False)),
        shifted_copy=not entry.get("logits_kept", False) and _before(version, "transformers.labels_padded_since"),
        fused_norm=bool(entry.get("fused_norm", fused)),
        fused_swiglu=bool(entry.get("fused_swiglu", False)),
        fused_rotary=bool(entry.get("fused_rotary", fused)),
        fused_adapters="fused lora" in kernels,
    )


def _before(version: tuple[int, ...] | None, fact: str) -> bool:
    """Returns whether a version is older than the one of a fact; an unknown one is not."""
    since = _version(str(load_fact(fact).value))
    return version is not None and since is not None and version < since


def _stated_context(record: Record, torch: tuple[int, ...] | None) -> int | None:
    """Returns the CUDA context that a record's metric states, else that of a torch that loads all kernels at once."""
    if found := re.search(r"context ~?(\d+) ?mi?b\b", record.text("metric")):
        return int(found.group(1)) * MIB
    if torch is not None and torch < (2,):
        return int(load_fact("cuda.context_eager_loading_bytes").value)
    return None


def _stated_version(record: Record, package: str) -> tuple[int, ...] | None:
    found = re.search(rf"\b{package}[ =<>~]*(\d+(?:\.\d+)+)", record.text("versions"))
    return _version(found.group(1)) if found else None


def _version(text: str) -> tuple[int, ...] | None:
    parts = re.findall(r"\d+", text)
    return tuple(int(part) for part in parts) if parts else None


def _entry(record: Record) -> Mapping[str, Any]:
    """Returns the first entry of stacks.yaml whose patterns all match and whose date is not over; else empty."""
    date = record.text("date")
    for entry in _document()["stacks"]:
        if date and str(entry.get("until", date)) < date:
            continue
        if all(re.search(pattern, record.text(field), re.IGNORECASE) for field, pattern in entry["matches"].items()):
            found: Mapping[str, Any] = entry
            return found
    return {}


@cache
def _document() -> Mapping[str, Any]:
    document: Mapping[str, Any] = read_yaml(_HERE / "stacks.yaml")
    return document
