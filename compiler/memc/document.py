"""Documents: a plan or a refusal as JSON-ready dictionaries; the contract of `memc explain --json` and of memc.lock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

import memc
from memc.clock.steptime import StepTime
from memc.config import TrainingConfig
from memc.facts.records import Calibration
from memc.ledger.entries import Entry, Ledger, Resource, ResourceLedger
from memc.plan import Budget, Certified, Infeasible, Plan, TrailStep

EXPLAIN_SCHEMA = "memc/explain/1"
LOCK_SCHEMA = "memc/lock/1"


def explain_document(answer: Plan | Infeasible, *, spec_digest: str, resolved: dict[str, Any]) -> dict[str, Any]:
    """Returns what `memc explain --json` prints. Sizes are integers in bytes, times are seconds.

    Args:
        answer: A plan, or a refusal; a refusal is described by the configuration that comes nearest.
        spec_digest: SHA-256 of the resolved spec.
        resolved: The spec with every default filled in.
    """
    if isinstance(answer, Plan):
        config, ledger, clock, refusal = answer.config, answer.ledger, answer.clock, None
        rung, techniques, warnings = answer.rung, list(answer.techniques), list(answer.warnings)
        total_steps = answer.total_steps
    else:
        config, ledger, clock = answer.closest_config, answer.closest_ledger, answer.closest_clock
        rung, techniques, warnings, total_steps = None, [], [], None
        refusal = _refusal(answer)
    return {
        "schema": EXPLAIN_SCHEMA,
        "memc": memc.__version__,
        "spec": {"name": answer.name, "digest": spec_digest, "resolved": resolved},
        "feasible": isinstance(answer, Plan),
        "model": {
            "key": answer.model.key,
            "model_type": answer.model.model_type,
            "params": answer.model.total_params,
            "params_by_component": {str(k): v for k, v in answer.model.params_by_component().items()},
        },
        "hardware": {"gpu": answer.gpu.key, "name": answer.gpu.name, "capacity_bytes": answer.budget.capacity_bytes},
        "calibration": None if answer.gpu.calibration is None else _calibration(answer.gpu.calibration),
        "budget": _budget(answer.budget),
        "plan": {
            "settings": settings_document(config),
            "rung": rung,
            "techniques": techniques,
            "total_steps": total_steps,
            "warnings": warnings,
        },
        "ledger": ledger_document(ledger),
        "clock": clock_document(clock),
        "traced": _traced(answer.traced) if isinstance(answer, Plan) and answer.traced is not None else None,
        "reasons": list(answer.reasons) if isinstance(answer, Plan) else list(answer.causes),
        "trail": [_trail_step(step) for step in answer.trail],
        "infeasible": refusal,
        "considered": answer.considered,
    }


def lock_document(
    plan: Plan, *, spec_digest: str, resolved: dict[str, Any], files: dict[str, str], command: str
) -> dict[str, Any]:
    """Returns what memc.lock holds.

    Args:
        plan: The decided record.
        spec_digest: SHA-256 of the resolved spec.
        resolved: The spec with every default filled in.
        files: SHA-256 of each generated file, by relative path.
        command: The command that writes the folder again.
    """
    explained = explain_document(plan, spec_digest=spec_digest, resolved=resolved)
    kept = ("memc", "spec", "model", "hardware", "budget", "plan", "ledger", "clock", "trail")
    own = {"calibration": explained["calibration"]} if explained["calibration"] is not None else {}
    return {
        "schema": LOCK_SCHEMA,
        **{key: explained[key] for key in kept},
        **own,
        "command": command,
        "facts": plan.facts,
        "files": files,
        "measurements": [],
        "provenance": [record_document(item) for item in plan.provenance],
        "run": record_document(plan.run),
    }


def lock_digest(lock: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a lock without its measurements, which verification adds, and without this digest."""
    own = {key: value for key, value in lock.items() if key not in ("digest", "measurements")}
    return hashlib.sha256(json.dumps(own, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def settings_document(config: TrainingConfig) -> dict[str, Any]:
    """Returns every choice of a configuration; nested settings keep their names, derived ones are added."""
    settings = record_document(config)
    settings["world_size"] = config.world_size
    settings["global_batch_size"] = config.global_batch_size
    settings["zero_stage"] = config.zero_stage
    settings["activation_checkpointing"] = config.checkpoint_every
    settings["offload_optimizer"] = config.offload_optimizer.value
    settings["offload_param"] = config.offload_param.value
    return settings


def ledger_document(ledger: Ledger) -> dict[str, Any]:
    """Returns the bill by resource."""
    return {resource.value: _resource(ledger.of(resource)) for resource in Resource}


def clock_document(clock: StepTime) -> dict[str, Any]:
    """Returns the time of a step and of the run; seconds rounded to microseconds, None where the card is not timed."""
    if clock.unknown:
        times = ("step", "compute", "bandwidth", "communication", "offload", "total")
        return {
            **{f"{name}_seconds": None for name in times},
            "tokens_per_step": clock.tokens_per_step,
            "tokens_per_second_per_gpu": None,
            "total_usd": None,
            "assumptions": list(clock.assumptions),
            "unknown": list(clock.unknown),
        }
    return {
        "step_seconds": round(clock.step_seconds, 6),
        "compute_seconds": round(clock.compute_seconds, 6),
        "bandwidth_seconds": round(clock.bandwidth_seconds, 6),
        "communication_seconds": round(clock.communication_seconds, 6),
        "offload_seconds": round(clock.offload_seconds, 6),
        "tokens_per_step": clock.tokens_per_step,
        "tokens_per_second_per_gpu": round(clock.tokens_per_second_per_gpu, 3),
        "total_seconds": None if clock.total_seconds is None else round(clock.total_seconds, 3),
        "total_usd": None if clock.total_usd is None else round(clock.total_usd, 2),
        "assumptions": list(clock.assumptions),
    }


def _resource(bill: ResourceLedger) -> dict[str, Any]:
    return {
        "peak_allocated_bytes": bill.peak_allocated_bytes,
        "peak_reserved_bytes": bill.peak_reserved_bytes,
        "required_bytes": bill.required_bytes,
        "uncertainty_bytes": bill.uncertainty_bytes,
        "grade": bill.grade.value,
        "binding_phase": bill.binding_phase.value,
        "by_phase": {phase.value: size for phase, size in bill.by_phase().items()},
        "by_account": {account.value: size for account, size in bill.by_account().items()},
        "entries": [_entry(entry) for entry in bill.entries],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    phases = {moment.phase.value for moment in entry.moments}
    return {
        "name": entry.name,
        "account": entry.account.value,
        "bytes": entry.bytes,
        "phases": sorted(phases),
        "moments": sorted(moment.value for moment in entry.moments),
        "formula": entry.formula,
        "source": entry.source,
        "grade": entry.grade.value,
        "in_allocator": entry.in_allocator,
        "uncertainty_bytes": entry.uncertainty_bytes,
        "uncertainty": entry.uncertainty,
    }


def _traced(certified: Certified) -> dict[str, Any]:
    """Returns how the trace compares; what the trace itself found stands in the lock."""
    step, comparison = certified.step, certified.comparison
    return {
        "agrees": comparison.agrees,
        "difference_bytes": comparison.difference_bytes,
        "interval_bytes": comparison.interval_bytes,
        "required_bytes": comparison.traced_required_bytes,
        "phases": [record_document(item) for item in comparison.phases],
        "stacks": [record_document(item) for item in step.stacks],
        "versions": step.versions,
        "assumes": list(step.assumes),
        "not_modelled": list(step.not_modelled),
    }


def _calibration(calibration: Calibration) -> dict[str, Any]:
    """Returns the user's own figures, whole where nothing is lost, so that a lock can be planned again with them."""
    return {
        "origin": calibration.origin,
        "figures": {
            name: {part: _whole(value) for part, value in record_document(figure).items()}
            for name, figure in calibration.figures.items()
        },
    }


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _budget(budget: Budget) -> dict[str, Any]:
    return record_document(budget)


def _trail_step(step: TrailStep) -> dict[str, Any]:
    record = record_document(step)
    if step.step_seconds is not None:
        record["step_seconds"] = round(step.step_seconds, 6)
    return record


def _refusal(answer: Infeasible) -> dict[str, Any]:
    return {
        "binding": str(answer.binding),
        "shortfall_bytes": answer.shortfall_bytes,
        "causes": list(answer.causes),
        "relaxations": [record_document(item) for item in answer.relaxations],
    }


def record_document(value: Any) -> dict[str, Any]:
    """Returns the fields of any frozen record of memc, enums as their values and tuples as lists."""
    return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return record_document(value)
    return value
