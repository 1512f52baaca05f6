"""The neutral words of reports for techniques, and which techniques they mean."""

from __future__ import annotations

import re

from memc.ladder import LADDER, Dimension

_WORDS: tuple[tuple[str, str], ...] = (
    (
        r"8-?bit (adam|optimizer)|adam\w*8bit|optimizer 8-?bit|8-?bit states",
        r"adamw-8bit|paged-adamw-8bit|bf16-adamw-8bit",
    ),
    (r"paged", r"paged-adamw.*"),
    (r"bf16 (states|weights|optimizer)|pure bf16", r"bf16-states|zero-bf16-states|bf16-adamw-8bit"),
    (r"offload_param|param(eter)? offload|offload.*param", r"offload-param(-nvme)?"),
    (r"nvme", r"offload-(optimizer|param)-nvme"),
    (r"offload_optimizer|optimizer offload|offload.*optimizer|cpu offload", r"offload-optimizer(-nvme)?|paged-adamw"),
    (r"micro.?batch|accumulation|batch reduction|smaller batch", r"accumulate-.*"),
    (r"(fused|chunked).*loss|loss.*(fused|chunked)|liger|cut cross", r"chunked-loss"),
    (r"checkpoint.*offload|activation offload", r"checkpoint-offload"),
    (r"checkpoint|recompute", r"checkpoint-every-.*"),
    (r"sequence parallel|context parallel|ulysses|ring attention", r"context-parallel-.*"),
    (r"hybrid|hpz", r"fsdp-hybrid|zero-3-hybrid"),
    (r"fsdp", r"fsdp(-hybrid)?"),
    (r"zero.?3|stage 3", r"zero-3(-hybrid)?"),
    (r"zero.?2|stage 2", r"zero-2"),
    (r"zero.?1|stage 1", r"zero-1"),
    (r"qlora|4-?bit|quanti[sz]", r"qlora"),
    (r"lora", r"lora"),
)
_INPUTS: tuple[tuple[str, str], ...] = (
    (r"flash|sdpa|attention", r"pin\.attention"),
    (r"\b\d+ (gpus|cards|nodes)|more (gpus|cards|nodes)", r"hardware\.(count|nodes).*"),
    (r"bigger card|larger card|larger gpu", r"hardware\.gpu"),
    (r"shorter|length|seq", r"data\.max_length"),
    (r"pixels|image size|resolution", r"data\.image_pixels"),
    (r"micro.?batch|batch", r"pin\.micro_batch_size"),
    (r"8-?bit|optimizer(?!.*offload)", r"pin\.optimizer"),
    (r"offload_optimizer|optimizer offload", r"pin\.offload_optimizer"),
    (r"offload_param|param(eter)? offload", r"pin\.offload_param"),
    (r"checkpoint", r"pin\.activation_checkpointing"),
    (r"zero|fsdp|shard", r"pin\.(zero_stage|engine)"),
    (r"host|ram", r"hardware\.host_memory"),
    (r"lora|method", r"method"),
)


def techniques_meant(words: str) -> set[str]:
    """Returns the techniques that the words of a report mean; empty when none is known."""
    text, found = words.lower(), set()
    for pattern, names in _WORDS:
        if re.search(pattern, text):
            found |= {technique.name for technique in LADDER if re.fullmatch(names, technique.name)}
    if "only" in text and "optimizer" in text:
        found -= {name for name in found if name.startswith("offload-param")}
    return found


def inputs_meant(words: str) -> list[str]:
    """Returns patterns of the spec fields whose change the words of a report mean."""
    return [inputs for pattern, inputs in _INPUTS if re.search(pattern, words.lower())]


def weight(name: str) -> int:
    """Returns the rung of a technique on the ladder of one card."""
    return next(technique.rung for technique in LADDER if technique.name == name)


def changes_method(name: str) -> bool:
    """Whether a technique changes what is trained."""
    return next(technique for technique in LADDER if technique.name == name).dimension is Dimension.METHOD
