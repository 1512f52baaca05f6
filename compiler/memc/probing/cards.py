"""What a card achieves: matrix products by shape and type, copies in its memory, to the host, between cards."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from memc.probing.timing import lasting, seconds_each
from memc.units import GIB, MIB

Shape = tuple[int, int, int]

SHAPES: tuple[Shape, ...] = (
    (2048, 4096, 4096),
    (2048, 4096, 14336),
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (8192, 896, 4864),
    (8192, 8192, 8192),
)
"""Rows, inner dimension, columns: tokens x input features x output features of layers; the last is the large one."""
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
_LARGE_SHARE = 0.5


def products(
    device: torch.device, seconds: float, *, shapes: tuple[Shape, ...] = SHAPES, names: tuple[str, ...] = tuple(_TYPES)
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Returns operations per second of the last shape under lasting load by type, and of all shapes in TFLOP/s.

    Half of a type's time goes to the last shape, so that clocks fall as they do in training.
    """
    wanted = [name for name in names if _has(device, name)]
    figures: dict[str, list[float]] = {}
    by_shape: dict[str, Any] = {}
    for name in wanted:
        each = seconds / len(wanted)
        with _precision(name):
            rest = {shape: _rate(device, name, shape, each * (1 - _LARGE_SHARE) / len(shapes)) for shape in shapes[:-1]}
            large = _rate(device, name, shapes[-1], each * _LARGE_SHARE)
        figures[f"matmul_flops_per_second.{name}"] = large
        told = {**{shape: median(rates) for shape, rates in rest.items()}, shapes[-1]: median(large)}
        by_shape[name] = {"x".join(map(str, shape)): round(rate / 1e12, 3) for shape, rate in told.items()}
    return figures, {"tflops_by_shape": by_shape}


def _has(device: torch.device, name: str) -> bool:
    if device.type != "cuda":
        return name in ("bf16", "fp32")
    major = torch.cuda.get_device_capability(device)[0]
    return name in ("fp16", "fp32") or major >= 8


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """Lets products of fp32 run in TF32, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _rate(device: torch.device, name: str, shape: Shape, seconds: float) -> list[float]:
    """Returns operations per second of a product, over the later half of the time."""
    rows, inner, columns = shape
    left = torch.randn(rows, inner, device=device, dtype=_TYPES[name])
    right = torch.randn(inner, columns, device=device, dtype=_TYPES[name])
    out = torch.empty(rows, columns, device=device, dtype=_TYPES[name])
    each = seconds_each(lambda: torch.mm(left, right, out=out), _wait(device), seconds)
    return [2 * rows * inner * columns / one for one in lasting(each)]


def copies(device: torch.device, seconds: float, *, most_bytes: int = 4 * GIB) -> dict[str, list[float]]:
    """Returns bytes per second of copies within the card's memory, read and written."""
    size = most_bytes
    if device.type == "cuda":
        size = min(most_bytes, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    each = seconds_each(lambda: target.copy_(source), _wait(device), seconds)
    return {"memory_bytes_per_second": [2 * size / one for one in lasting(each)]}


def transfers(
    device: torch.device, seconds: float, *, size: int = 512 * MIB
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Returns bytes per second between host and card of the slower direction, pinned and not, and of each direction."""
    figures: dict[str, list[float]] = {}
    details: dict[str, Any] = {}
    there = torch.ones(size, dtype=torch.uint8, device=device)
    for kind, pinned in (("pcie", device.type == "cuda"), ("pcie_unpinned", False)):
        here = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
        up = seconds_each(lambda: there.copy_(here, non_blocking=True), _wait(device), seconds / 4)  # noqa: B023
        down = seconds_each(lambda: here.copy_(there, non_blocking=True), _wait(device), seconds / 4)  # noqa: B023
        slower = max((lasting(up), lasting(down)), key=median)
        figures[f"{kind}_bytes_per_second"] = [size / one for one in slower]
        details[kind] = {
            "to_card_gb_per_second": round(size / median(up) / 1e9, 3),
            "to_host_gb_per_second": round(size / median(down) / 1e9, 3),
        }
    return figures, details


def all_reduce(
    count: int, seconds: float, *, backend: str = "nccl", size: int = 256 * MIB
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Returns the bus bandwidth of all-reduce between `count` processes, each on its card.

    Source: NCCL tests, doc/PERFORMANCE.md: what each rank sends is 2 (n - 1) / n of the payload.

    Raises:
        Exception: Whatever a process raises.
    """
    with tempfile.TemporaryDirectory(prefix="memc-probe-") as scratch:
        out = Path(scratch) / "seconds"
        arguments = (count, backend, f"file://{scratch}/meeting", size, seconds, str(out))
        spawn(_reduce, args=arguments, nprocs=count)  # type: ignore[no-untyped-call]
        each = [float(line) for line in out.read_text(encoding="utf-8").split()]
    moved = 2 * (count - 1) / count * size
    return {"allreduce_bytes_per_second": [moved / one for one in lasting(each)]}, {"gpus": count, "bytes": size}


def _reduce(rank: int, count: int, backend: str, meeting: str, size: int, seconds: float, out: str) -> None:
    """Reduces a tensor again and again; rank 0 writes the seconds of each time."""
    device = torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    torch.distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=count)
    try:
        payload = torch.ones(size // 4, dtype=torch.float32, device=device)
        repeats = torch.ones(1, device=device)
        found: list[float] = []
        for _ in range(2):
            torch.distributed.all_reduce(payload)
        _wait(device)()
        end = time.monotonic() + seconds
        while repeats.item() > 0 and len(found) < 1000:
            begin = time.perf_counter()
            torch.distributed.all_reduce(payload)
            _wait(device)()
            found.append(max(time.perf_counter() - begin, 1e-9))
            repeats.fill_(float(len(found) < 3 or time.monotonic() < end))
            torch.distributed.broadcast(repeats, 0)
            payload.fill_(1.0)
        if rank == 0:
            Path(out).write_text("\n".join(map(str, found)), encoding="utf-8")
    finally:
        torch.distributed.destroy_process_group()


def _wait(device: torch.device) -> Callable[[], object]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None
