"""torch's out-of-memory message in the wordings that its versions print, as sizes in bytes.

Source: github.com/pytorch/pytorch c10/cuda/CUDACachingAllocator.cpp, from 1.0 ("already allocated; ... cached", the
last without what is allocated) over 1.4 ("reserved in total by PyTorch") and 2.1 ("has a total capacty of", with the
typing error) to the present.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memc.units import GIB, KIB, MIB

NEEDLES = (b"out of memory", b"Out of memory", b"OutOfMemoryError")
_UNITS = {"bytes": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": KIB, "MB": MIB, "GB": GIB, "TiB": 1024 * GIB}
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]i?B|B)"
_STARTS = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend|GPU|NPU) out of memory|CUDA error: out of memory|HIP error: out of memory"
    r"|(?:torch\.(?:cuda\.)?)?OutOfMemoryError|\bout of memory\b"
)
_PATTERNS = {
    "tried": rf"[Tt]ried to allocate {_SIZE}",
    "capacity": rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|{_SIZE} free",
    "this_process": rf"this process has {_SIZE} memory in use",
    "allowed": rf"{_SIZE} allowed",
    "allocated": rf"allocated memory {_SIZE} is allocated by PyTorch|{_SIZE} already allocated",
    "private_pools": rf"with {_SIZE} allocated in private pools",
    "unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
    "mps_allocated": rf"MPS allocated: {_SIZE}",
}
_COMPILED = {name: re.compile(pattern) for name, pattern in _PATTERNS.items()}
_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_GPU = re.compile(r"\(GPU (\d+);|GPU (\d+) has a total")


@dataclass(frozen=True, kw_only=True)
class TorchMessage:
    """One out-of-memory message.

    Attributes:
        gpu: Index of the card; None when the message does not say.
        sizes: Bytes by name: tried, capacity, free, this_process, allowed, allocated, private_pools, unallocated,
            reserved; only what the message says, and what follows from it.
        others_bytes: What other processes hold on the card.
    """

    gpu: int | None
    sizes: dict[str, int]
    others_bytes: int


def parse_message(text: str) -> TorchMessage | None:
    """Returns the message that begins `text` (on one line); None when it is none."""
    start = _STARTS.search(text)
    if start is None:
        return None
    text = text[start.start() :]
    sizes: dict[str, int] = {}
    for name, pattern in _COMPILED.items():
        match = pattern.search(text)
        if match:
            number, unit = [part for part in match.groups() if part is not None][:2]
            sizes[name] = _bytes(number, unit)
    if "unallocated" not in sizes and {"reserved", "allocated"} <= sizes.keys():
        sizes["unallocated"] = max(0, sizes["reserved"] - sizes["allocated"])
    if "reserved" not in sizes and {"unallocated", "allocated"} <= sizes.keys():
        sizes["reserved"] = sizes["unallocated"] + sizes["allocated"]
    gpu = _GPU.search(text)
    index = None if gpu is None else int(gpu.group(1) or gpu.group(2))
    return TorchMessage(gpu=index, sizes=sizes, others_bytes=_others(text, sizes))


def _others(text: str, sizes: dict[str, int]) -> int:
    """Returns the bytes of other processes.

    In a container the message cannot tell its own process from others and lists it by number: then the one that could
    hold what torch reserved is taken for it.
    """
    listed = sorted(_bytes(match[2], match[3]) for match in _PROCESS.finditer(text))
    if "this_process" not in sizes and listed and "reserved" in sizes:
        own = next((size for size in listed if size >= sizes["reserved"] * 0.99), None)
        if own is not None:
            listed.remove(own)
    return sum(listed)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
