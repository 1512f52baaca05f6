"""What a card achieves: bf16 matrix products, copies within its memory, and pinned copies to and from the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

MATMUL_SHAPES: tuple[tuple[int, int, int], ...] = (
    (8192, 8192, 8192),
    (2048, 2048, 2048),
    (2048, 2048, 8192),
    (2048, 4096, 4096),
    (2048, 4096, 14336),
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (16384, 4096, 14336),
    (2048, 4096, 128256),
    (8192, 5120, 17408),
    (8192, 896, 4864),
)
"""Rows, inner dimension and columns of products of training: tokens x input features x output features."""

_HBM_BYTES = 8 << 30
_PCIE_BYTES = 1 << 30


def rates() -> dict[str, Any]:
    """Returns measured rates by kind; every figure is the median of five timed runs after a warm-up."""
    return {
        "matmul_bf16_tflops": {"x".join(map(str, shape)): _matmul_tflops(*shape) for shape in MATMUL_SHAPES},
        "hbm_copy_gb_per_second": _device_copy(),
        "pcie_pinned_gb_per_second": _host_copies(),
    }


def _matmul_tflops(rows: int, inner: int, columns: int) -> float:
    left = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(inner, columns, device="cuda", dtype=torch.bfloat16)
    operations = 2 * rows * inner * columns
    repeats = max(3, int(4e12 / operations))
    seconds = _median_seconds(lambda: torch.mm(left, right), repeats)
    return round(operations / seconds / 1e12, 1)


def _device_copy() -> float:
    """Returns GB/s counting bytes read and written."""
    source = torch.empty(_HBM_BYTES, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    seconds = _median_seconds(lambda: target.copy_(source), 5)
    return round(2 * _HBM_BYTES / seconds / 1e9, 1)


def _host_copies() -> dict[str, float]:
    host = torch.empty(_PCIE_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_PCIE_BYTES, dtype=torch.uint8, device="cuda")
    there = _median_seconds(lambda: device.copy_(host, non_blocking=True), 3)
    back = _median_seconds(lambda: host.copy_(device, non_blocking=True), 3)
    return {
        "host_to_device": round(_PCIE_BYTES / there / 1e9, 2),
        "device_to_host": round(_PCIE_BYTES / back / 1e9, 2),
    }


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / repeats)
    return sorted(found)[2]
