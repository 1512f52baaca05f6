"""One case measured in a process of its own: peaks by phase, what the card shows, and the time of a step."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from memc.config import Reference
from memc.trace.build import build
from memc.trace.optional import library

from cards.cases import Case, config_of
from cards.steps import LEAST, MOST, TIMED_SECONDS, WARM_UP
from cards.training import Training, training_of
from cards.weights import fill

_LIBRARIES = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate")


def prepare(case: Case) -> Any:
    """Returns the model on the meta device, and its reference: all that can be done before the card is free."""
    made = [build(case.config, config_of(case.model), shallow=False)[0]]
    if case.config.reference is Reference.MODEL:
        made.append(build(case.config, config_of(case.model), shallow=False)[0].requires_grad_(False).eval())
    return tuple(made)


def measure(case: Case, models: Any) -> dict[str, Any]:
    """Returns all figures of a case; one that runs out of memory says so under `error`, with what it had."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"case": case.name, "kind": "measured", **_where(device)}
    try:
        _measure(case, models, device, result)
    except torch.OutOfMemoryError as error:
        result |= {"kind": "oom", "error": " ".join(str(error).split()), **_held()}
    return result


def _measure(case: Case, models: Any, device: torch.device, result: dict[str, Any]) -> None:
    cuda = device.type == "cuda"
    before = _used(start=True) if cuda else 0
    result["used_before_bytes"] = before
    for model in models:
        fill(model, case.config, device)
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        result["after_load"] = _held()
        result["context_after_load_bytes"] = _used() - before - torch.cuda.memory_reserved()
    marks = _Marks(cuda)
    training = training_of(models, case.config, marks)
    gc.collect()
    marks.begin()
    training.step()
    result["first_step"] = marks.peaks()
    marks.begin()
    training.step()
    result["steady_step"] = marks.peaks()
    marks.watching = False
    result |= _timed(training, marks, cuda)
    if cuda:
        result["held_at_end"] = _held()
        result["device_used_bytes"] = _used() - before
        result["context_bytes"] = _used() - before - torch.cuda.memory_reserved()
        result["allocator_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]


def _timed(training: Training, marks: _Marks, cuda: bool) -> dict[str, Any]:
    """Returns seconds of several steps after warm-up, each ended by a synchronisation, and the median of phases."""
    for _ in range(WARM_UP - 1):
        training.step()
    _synchronise(cuda)
    seconds: list[float] = []
    while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < TIMED_SECONDS):
        begin = time.perf_counter()
        training.step()
        _synchronise(cuda)
        seconds.append(time.perf_counter() - begin)
    marks.timing = cuda
    phases: list[dict[str, float]] = []
    for _ in range(LEAST if cuda else 0):
        marks.start_events()
        training.step()
        _synchronise(cuda)
        phases.append(marks.phase_seconds())
    marks.timing = False
    by_phase = (
        {name: round(statistics.median(each[name] for each in phases), 6) for name in phases[0]} if phases else {}
    )
    return {
        "step_seconds": [round(value, 6) for value in seconds],
        "median_step_seconds": round(statistics.median(seconds), 6),
        "phase_seconds": by_phase,
    }


class _Marks:
    """Reads peaks, or records events, whenever a phase ends."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.watching, self.timing = cuda, True, False
        self._peaks: dict[str, dict[str, int]] = {}
        self._events: list[tuple[str, Any]] = []

    def __call__(self, phase: str) -> None:
        if self.timing:
            self._record(phase)
        elif self.watching and self.cuda:
            now = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            kept = self._peaks.setdefault(phase, now)
            self._peaks[phase] = {name: max(kept[name], now[name]) for name in now}
            torch.cuda.reset_peak_memory_stats()

    def begin(self) -> None:
        self._peaks = {}
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, dict[str, int]]:
        return self._peaks

    def start_events(self) -> None:
        self._events = []
        self._record("")

    def _record(self, phase: str) -> None:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append((phase, event))

    def phase_seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for (_, begin), (phase, end) in zip(self._events, self._events[1:], strict=False):
            found[phase] = found.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        return found


def _synchronise(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def _held() -> dict[str, int]:
    if not torch.cuda.is_available():
        return {}
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def _used(*, start: bool = False) -> int:
    """Returns bytes in use on the whole card as the driver counts them; with `start` before a context is made."""
    pynvml = library("pynvml", "a card's memory")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    used = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    if start:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    return used


def _where(device: torch.device) -> dict[str, Any]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    found: dict[str, Any] = {
        "device": device.type,
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
        "python": platform.python_version(),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF", ""),
        "modules": sorted({name.partition(".")[0] for name in sys.modules} & {"flash_attn", "kernels", "triton"}),
    }
    if device.type == "cuda":
        pynvml = library("pynvml", "a card's driver")
        pynvml.nvmlInit()
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device_name": properties.name,
            "capacity_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "cuda": torch.version.cuda,
        }
    return found
