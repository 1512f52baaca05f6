"""What this machine has: its GPUs, asked of the driver without torch, and its memory."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

from memc.units import KIB

_DRIVERS = (
    ("libcuda.so.1", "cuInit", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceTotalMem_v2"),
    ("libamdhip64.so", "hipInit", "hipGetDeviceCount", "hipDeviceGetName", "hipDeviceTotalMem"),
)
_NAME_BYTES = 256
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, kw_only=True)
class LocalGpu:
    """One GPU as the driver names it.

    Attributes:
        name: Device name, for example ``NVIDIA A100-SXM4-80GB``.
        memory_bytes: Its memory as the driver counts it; 0 when the driver does not say.
    """

    name: str
    memory_bytes: int


def local_gpus() -> tuple[LocalGpu, ...]:
    """Returns the GPUs that a process started here would see; empty without a driver. Creates no context on any."""
    for library, initialise, count_devices, name_of, memory_of in _DRIVERS:
        try:
            driver = ctypes.CDLL(library)
            count = ctypes.c_int(0)
            if getattr(driver, initialise)(0) or getattr(driver, count_devices)(ctypes.byref(count)):
                continue
            found = [_gpu(driver, index, name_of, memory_of) for index in range(count.value)]
        except (OSError, AttributeError):
            continue
        if found:
            return tuple(gpu for gpu in found if gpu.name)
    return ()


def host_memory_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """Returns the memory of this machine; None when the system does not say."""
    try:
        text = meminfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return None if match is None else int(match.group(1)) * KIB


def _gpu(driver: ctypes.CDLL, index: int, name_of: str, memory_of: str) -> LocalGpu:
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t(0)
    if getattr(driver, name_of)(name, _NAME_BYTES, index):
        return LocalGpu(name="", memory_bytes=0)
    known = getattr(driver, memory_of)(ctypes.byref(memory), index) == 0
    return LocalGpu(name=name.value.decode("utf-8", "replace"), memory_bytes=memory.value if known else 0)
