"""How many GPUs this machine's driver offers, asked without torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_DRIVERS = (
    ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),
    ("libamdhip64.so", "hipInit", "hipGetDeviceCount"),
)


@dataclass(frozen=True, kw_only=True)
class VisibleGpus:
    """What the driver said.

    Attributes:
        count: GPUs that a process started now would see (CUDA_VISIBLE_DEVICES counts).
        reason: Why there is none, as a clause; empty when there is one.
    """

    count: int
    reason: str


def visible_gpus() -> VisibleGpus:
    """Returns how many GPUs a process started from here would see. Creates no context on any of them."""
    reasons = []
    for library_name, initialise, count_devices in _DRIVERS:
        try:
            driver = ctypes.CDLL(library_name)
        except OSError:
            reasons.append(f"{library_name} is not installed")
            continue
        status = getattr(driver, initialise)(0)
        if status != 0:
            reasons.append(f"{initialise} of {library_name} returned error {status}")
            continue
        count = ctypes.c_int(0)
        status = getattr(driver, count_devices)(ctypes.byref(count))
        if status == 0 and count.value > 0:
            return VisibleGpus(count=count.value, reason="")
        reasons.append(f"{library_name} sees no device")
    return VisibleGpus(count=0, reason="; ".join(reasons))
