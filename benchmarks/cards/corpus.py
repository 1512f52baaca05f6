"""What a card measured, in the form of a collection of published measurements: memory and time, one record a case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from memc.calibration.configs import settings_of
from memc.config import LossHead, Precision, TrainingConfig
from memc.units import GIB

from cards.cases import Case

PREFIX = "h200-"
_SOURCE = "measured on one H200, random weights and tokens (benchmarks/card_suite.py)"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def memory_record(case: Case, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one record of memory.

    Args:
        case: The configuration.
        found: What `cards.measuring` measured of it.
    """
    config, ran = case.config, found["kind"] == "measured"
    peaks = _peaks(found) if ran else {}
    allocated = max((peak["allocated"] for peak in peaks.values()), default=None)
    others: dict[str, Any] = (
        {"error": found["error"]}
        if not ran
        else {
            "peak_reserved_bytes": max(peak["reserved"] for peak in peaks.values()),
            "context_bytes": found["context_bytes"],
            "device_used_bytes": found["device_used_bytes"],
            "after_load": found["after_load"],
            "by_phase": peaks,
            "allocator_retries": found["allocator_retries"],
        }
    )
    return {
        "id": PREFIX + case.name,
        "group": "one H200",
        "source": _SOURCE,
        "source_kind": found["kind"],
        "date": found["date"],
        "versions": _versions(found),
        "gpu": found["device_name"],
        "gpu_mem_gb": 141,
        "n_gpus": 1,
        "n_nodes": 1,
        "model": case.model,
        "model_dims": None,
        **_method(case),
        "weight_dtype": _weights(config),
        "mixed_precision": "none" if config.precision is Precision.BF16_PURE else "bf16 autocast",
        "optimizer": config.optimizer.value,
        "sharding": "none",
        "parallelism": None,
        "offload": "none",
        "gradient_checkpointing": _checkpointing(config),
        "attention": config.attention.value,
        "fused_kernels": _fused(config),
        "micro_batch": config.micro_batch_size,
        "seq_len": config.max_length,
        "seq_len_kind": "one padded token a sample" if config.padding_mask else "every token counts",
        "grad_accum": config.gradient_accumulation_steps,
        "packing": config.packing,
        "framework": "transformers model, the loop of Trainer",
        "metric": "max_memory_allocated over two steps, loading left out",
        "unit": "bytes",
        "value_raw": allocated,
        "value_gib": round(allocated / GIB, 3) if allocated else None,
        "per_gpu": True,
        "other_metrics": others,
        "notes": f"allocator: {found['allocator']}",
        "confidence": "high",
        "settings": settings_of(config),
    }


def time_record(case: Case, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one record of a step's time, of a case that ran."""
    config, seconds = case.config, found["median_step_seconds"]
    return {
        "id": PREFIX + case.name,
        "source": _SOURCE,
        "date": found["date"],
        "versions": _versions(found),
        "gpu": "H200 141GB SXM",
        "n_gpus": 1,
        "n_nodes": 1,
        "interconnect": None,
        "model": case.model,
        **_method(case),
        "dtype": "bf16 autocast" if config.precision is Precision.BF16 and config.lora is None else "bf16",
        "optimizer": config.optimizer.value,
        "sharding": "none",
        "parallelism": None,
        "offload": "none",
        "checkpointing": _checkpointing(config),
        "attention": config.attention.value,
        "fused": _fused(config),
        "micro_batch": config.micro_batch_size,
        "grad_accum": config.gradient_accumulation_steps,
        "seq_len": config.max_length,
        "metric": "median step after warm-up, synchronised",
        "value_printed": f"{seconds} s, median of {len(found['step_seconds'])}",
        "tokens_per_sec_per_gpu": round(config.global_batch_size * config.max_length / seconds, 1),
        "step_time_s": seconds,
        "step_seconds": found["step_seconds"],
        "phase_seconds": found["phase_seconds"],
        "notes": None,
        "confidence": "high",
    }


def results(memory: Iterable[Mapping[str, Any]], times: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns what was measured by name of the case, from the records of both files."""
    by_id = {record["id"]: record for record in times}
    return {str(record["id"]).removeprefix(PREFIX): _result(record, by_id.get(record["id"], {})) for record in memory}


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file."""
    found: list[dict[str, Any]] = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    return found


def text(records: list[dict[str, Any]], heading: str) -> str:
    """Returns the records as YAML under a line of comment."""
    return f"# {heading}\n" + yaml.safe_dump(records, sort_keys=False, allow_unicode=True, width=120)


def _result(memory: Mapping[str, Any], times: Mapping[str, Any]) -> dict[str, Any]:
    others = memory["other_metrics"]
    found: dict[str, Any] = {"kind": memory["source_kind"], "not_compared": memory.get("not_compared", "")}
    if found["kind"] == "measured":
        found |= {"peaks": others["by_phase"], "context_bytes": others["context_bytes"]}
    if times:
        found |= {"median_step_seconds": times["step_time_s"], "phase_seconds": times["phase_seconds"]}
    return found


def _peaks(found: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Returns peaks by phase, the larger of the first step and of a later one."""
    first, steady = found["first_step"], found["steady_step"]
    return {
        phase: {kind: max(first[phase][kind], steady[phase][kind]) for kind in ("allocated", "reserved")}
        for phase in first
    }


def _versions(found: Mapping[str, Any]) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{libraries}, CUDA {found['cuda']}, driver {found['driver']}, Python {found['python']}"


def _method(case: Case) -> dict[str, Any]:
    lora = case.config.lora
    adapters = None if lora is None else {"r": lora.rank, "target_modules": list(lora.target_modules)}
    return {"method": case.config.method.value, "lora": adapters}


def _weights(config: TrainingConfig) -> str:
    if config.lora is not None:
        return "nf4, double quantisation" if config.method.value == "qlora" else "bf16"
    return "bf16" if config.precision is Precision.BF16_PURE else "fp32"


def _checkpointing(config: TrainingConfig) -> str:
    if not config.checkpoint_every:
        return "none"
    return (
        "full (HF, per decoder layer)" if config.checkpoint_every == 1 else f"every {config.checkpoint_every}th layer"
    )


def _fused(config: TrainingConfig) -> str:
    return "chunked head and loss (TRL)" if config.loss is LossHead.CHUNKED else "none"
