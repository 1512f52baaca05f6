"""GPUs: `load_gpu` reads one record of specs/gpus."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from memc.errors import usage_error
from memc.facts.documents import read_names, read_spec, spec_file, spec_keys, unknown_name
from memc.facts.libraries import load_fact
from memc.facts.records import GpuFacts
from memc.units import MIB

_FOLDER = "gpus"
_GIGA = 1e9
_TERA = 1e12
_VENDOR_WORDS = re.compile(r"\b(nvidia|geforce|tesla|amd|radeon|instinct|intel|apple)\b")


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """One line of the GPU listing: key, display name, and the facts behind it."""

    key: str
    name: str
    facts: GpuFacts


def gpu_keys() -> tuple[str, ...]:
    """Returns the keys of all GPUs in the catalogue, sorted."""
    return spec_keys(_FOLDER)


def gpu_rows() -> tuple[GpuRow, ...]:
    """Returns the whole catalogue for a listing; reads every file."""
    facts = (_gpu(key) for key in gpu_keys())
    return tuple(GpuRow(key=gpu.key, name=gpu.name, facts=gpu) for gpu in facts)


def load_gpu(name: str) -> GpuFacts:
    """Returns the facts of the GPU called `name`: its key, its device name or an alias, in any case.

    Raises:
        MemcError: ``gpu-unknown`` with the nearest names, ``gpu-ambiguous`` when the name fits several cards.
    """
    folded = _fold(name)
    for key in gpu_keys():
        if _fold(key) == folded:
            return _gpu(key)
    names = {key: read_names(_FOLDER, key) for key in gpu_keys()}
    found = _matches(name, names)
    if len(found) == 1:
        return _gpu(found[0])
    if found:
        raise usage_error(
            "gpu-ambiguous",
            f"{name!r} fits {len(found)} GPUs: {', '.join(found)}",
            hint="write one of these keys",
        )
    known_names = [*names, *(alias for known in names.values() for alias in known)]
    raise unknown_name("gpu", name, known_names, hint="memc gpus lists the catalogue")


def _matches(name: str, names: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the keys that `name` may mean: by alias, else by start or end of the key, else by all its words."""
    folded = _fold(name)
    words = _VENDOR_WORDS.sub(" ", name.casefold()).replace("-", " ").replace("_", " ").split()
    if not folded:
        return []
    return (
        [key for key, known in names.items() if folded in {_fold(alias) for alias in known}]
        or [key for key in names if _fold(key).startswith(folded)]
        or [key for key in names if _fold(key).endswith(folded)]
        or [key for key in names if set(words) <= set(key.split("-"))]
    )


def _fold(name: str) -> str:
    """Returns a name without vendor words, case and punctuation: ``NVIDIA GeForce RTX 4090`` is ``rtx4090``."""
    return re.sub(r"[^a-z0-9]", "", _VENDOR_WORDS.sub("", name.casefold()))


@cache
def _gpu(key: str) -> GpuFacts:
    record = read_spec(_FOLDER, key)
    capability = record["compute_capability"]
    capacity_mib = _figure(record, "capacity_mib")
    return GpuFacts(
        key=key,
        name=record["name"],
        aliases=tuple(record["aliases"]),
        vendor=record["vendor"],
        architecture=record["architecture"],
        compute_capability=None if capability is None else _capability(capability),
        capacity_bytes=None if capacity_mib is None else int(capacity_mib * MIB),
        memory_bytes_per_second=_figure(record, "memory_gb_per_second", _GIGA),
        achieved_memory_bytes_per_second=_figure(record, "achieved_memory_gb_per_second", _GIGA),
        peak_flops_per_second=_rates(record["peak_tflops"]),
        achieved_flops_per_second=_rates(record["achieved_tflops"]),
        pcie_bytes_per_second=_figure(record, "pcie_gb_per_second_one_way", _GIGA),
        nvlink_bytes_per_second=_figure(record, "nvlink_gb_per_second_total", _GIGA),
        bf16=record["bf16"]["value"],
        flash_attention_2=record["flash_attention_2"]["value"],
        bitsandbytes=_runs_bitsandbytes(record["vendor"], record["architecture"]),
        usd_per_hour=_figure(record, "usd_per_gpu_hour"),
        purchase_usd=_figure(record, "purchase_usd"),
        source=f"{spec_file(_FOLDER, key).name}: {_sources(record)}",
        checked=record["checked"],
        achieved_pcie_bytes_per_second=_figure(record, "achieved_pcie_gb_per_second_one_way", _GIGA),
        achieved_allreduce_bytes_per_second=_figure(record, "achieved_allreduce_bus_gb_per_second", _GIGA),
        multiprocessors=_whole(record.get("multiprocessors")),
        sustained_flops_per_second=_rates(record["sustained_tflops"]) if "sustained_tflops" in record else None,
        board_power_watts=None if "board_power_watts" not in record else _figure(record, "board_power_watts"),
    )


def _runs_bitsandbytes(vendor: str, architecture: str) -> bool:
    """Returns whether the releases that memc plans with bring kernels for a card."""
    if vendor == "amd":
        return architecture in str(load_fact("bitsandbytes.rocm_architectures").value).split()
    return vendor == "nvidia"


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _figure(record: dict[str, Any], field: str, scale: float = 1.0) -> float | None:
    figure = record[field]
    return None if figure is None else float(figure["value"]) * scale


def _whole(figure: dict[str, Any] | None) -> int | None:
    return None if figure is None else int(figure["value"])


def _rates(figures: dict[str, Any]) -> dict[str, float]:
    return {precision: figure["value"] * _TERA for precision, figure in figures.items() if figure is not None}


def _sources(record: dict[str, Any]) -> str:
    """Returns the sources of the figures that decide a fit, in one line."""
    capacity = record["capacity_mib"]
    return record["source"] if capacity is None else f"{record['source']}; capacity: {capacity['source']}"
