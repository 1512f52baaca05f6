"""What the host achieves: copies within its memory, optimizers on its processor, its drive."""

from __future__ import annotations

import mmap
import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from memc.machine import host_memory_bytes
from memc.probing.timing import lasting, seconds_each
from memc.units import GIB, MIB
from memc.verify.operators import abandoned_locks, removing

_MEMORY_PART = 16
_CHUNK_BYTES = 16 * MIB
_LEAST_BYTES = 64 * MIB
_BYTES_PER_SECOND = 256 * MIB
"""Of each second that a part may take: five copies at a gigabyte a second fit in it."""
_BYTES_PER_ADAM_ELEMENT = 16
"""Weight, gradient and two moments in fp32."""


def copies(seconds: float, *, most_bytes: int = GIB) -> dict[str, list[float]]:
    """Returns bytes per second of copies within host memory, read and written."""
    size = _fitting(most_bytes, seconds)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    each = seconds_each(lambda: target.copy_(source), lambda: None, seconds)
    return {"host_memory_bytes_per_second": [2 * size / one for one in lasting(each)]}


def torch_adam(seconds: float, *, most_bytes: int = 4 * GIB) -> dict[str, list[float]]:
    """Returns elements per second that torch's fused AdamW updates on the processor."""
    weight = _trained(most_bytes, seconds)
    optimizer = torch.optim.AdamW([weight], lr=1e-6, fused=True)
    each = seconds_each(optimizer.step, lambda: None, seconds)
    return {"torch_host_adam_params_per_second": [weight.numel() / one for one in lasting(each)]}


def ready_deepspeed_adam() -> None:
    """Has DeepSpeed compile its CPU Adam, or load what was compiled before.

    Raises:
        ImportError: When DeepSpeed is not installed.
        RuntimeError: When a lock would have it wait for ever.
        Exception: Whatever its compilation raises.
    """
    made = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    if locks := [lock for lock in abandoned_locks(os.environ) if lock.parent.name == "cpu_adam"]:
        raise RuntimeError(removing(locks))
    made([torch.nn.Parameter(torch.ones(1))])


def deepspeed_adam(seconds: float, *, most_bytes: int = 4 * GIB) -> dict[str, list[float]]:
    """Returns elements per second that DeepSpeed's CPU Adam updates, once it is ready.

    Raises:
        ImportError: When DeepSpeed is not installed.
    """
    made = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    weight = _trained(most_bytes, seconds)
    optimizer = made([weight], lr=1e-6)
    each = seconds_each(optimizer.step, lambda: None, seconds)
    return {"host_adam_params_per_second": [weight.numel() / one for one in lasting(each)]}


def drive(folder: Path, seconds: float, *, most_bytes: int = 8 * GIB) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Returns bytes per second written to and read from a drive past the page cache, and how.

    A file in `folder` is written until half of the time is over, read back, and removed. Where the file system does
    not take direct transfers, what was written is forced to the drive and dropped from the cache first.

    Raises:
        OSError: When the folder cannot be written to.
    """
    path = folder / f".memc-probe-{os.getpid()}"
    buffer = mmap.mmap(-1, _CHUNK_BYTES)
    buffer.write(os.urandom(MIB) * (_CHUNK_BYTES // MIB))
    free = os.statvfs(folder)
    most = min(most_bytes, free.f_bavail * free.f_frsize // 2) // _CHUNK_BYTES
    try:
        handle, direct = _opened(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        begin, chunks = time.perf_counter(), 0
        try:
            while chunks < max(1, most) and (chunks < 2 or time.perf_counter() - begin < seconds / 2):
                os.write(handle, buffer)
                chunks += 1
            os.fsync(handle)
        finally:
            os.close(handle)
        written = time.perf_counter() - begin
        read = _read(path, buffer, chunks)
    finally:
        path.unlink(missing_ok=True)
        buffer.close()
    size = chunks * _CHUNK_BYTES
    figures = {"nvme_write_bytes_per_second": [size / written], "nvme_read_bytes_per_second": [size / read]}
    return figures, {"bytes": size, "direct": direct}


def _read(path: Path, buffer: mmap.mmap, chunks: int) -> float:
    """Returns seconds of reading a file."""
    handle, direct = _opened(path, os.O_RDONLY)
    try:
        if not direct:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        for _ in range(chunks):
            os.readv(handle, [buffer])
        return max(time.perf_counter() - begin, 1e-9)
    finally:
        os.close(handle)


def _opened(path: Path, flags: int) -> tuple[int, bool]:
    """Returns a handle past the page cache where the file system takes one, and whether it did."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        return os.open(path, flags, 0o600), False


def _trained(most_bytes: int, seconds: float) -> torch.nn.Parameter:
    """Returns a weight with its gradient, which together with two moments takes no more than `most_bytes`."""
    elements = _fitting(most_bytes, seconds) // _BYTES_PER_ADAM_ELEMENT
    weight = torch.nn.Parameter(torch.ones(elements))
    weight.grad = torch.full_like(weight, 1e-3)
    return weight


def _fitting(most_bytes: int, seconds: float) -> int:
    """Returns `most_bytes`, or less: a sixteenth of the host's memory, and what a slow host moves in the time."""
    memory = host_memory_bytes()
    size = min(most_bytes, max(_LEAST_BYTES, int(seconds * _BYTES_PER_SECOND)))
    return size if memory is None else min(size, memory // _MEMORY_PART)
