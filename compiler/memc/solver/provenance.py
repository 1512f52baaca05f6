"""Why each generated key has its value, and which facts a plan rests on."""

from __future__ import annotations

from memc.ladder import Dimension, Technique
from memc.plan import Provenance
from memc.solver.resolve import Question
from memc.solver.search import Candidate, Machine

_KEYS: dict[Dimension, tuple[tuple[str, str], ...]] = {
    Dimension.METHOD: (("peft_config.json", "r"), ("peft_config.json", "target_modules"), ("train.py", "METHOD")),
    Dimension.STATES: (("train.py", "optim"),),
    Dimension.SHARDING: (
        ("ds_config.json", "zero_optimization.stage"),
        ("accelerate.yaml", "deepspeed_config.deepspeed_config_file"),
    ),
    Dimension.OFFLOAD_OPTIMIZER: (("ds_config.json", "zero_optimization.offload_optimizer.device"),),
    Dimension.OFFLOAD_PARAM: (("ds_config.json", "zero_optimization.offload_param.device"),),
    Dimension.LOSS: (("train.py", "LOSS"),),
    Dimension.CHECKPOINTING: (("train.py", "activation_checkpointing"),),
    Dimension.MICRO_BATCH: (
        ("train.py", "per_device_train_batch_size"),
        ("train.py", "gradient_accumulation_steps"),
    ),
}


def provenance(machine: Machine, candidates: list[Candidate], chosen: Candidate) -> tuple[Provenance, ...]:
    """Returns one record per key that a technique set, with what the plan would need more without that technique."""
    by_names = {frozenset(t.name for t in candidate.techniques): candidate for candidate in candidates}
    names = frozenset(technique.name for technique in chosen.techniques)
    records = []
    for technique in chosen.techniques:
        without = by_names.get(names - {technique.name})
        saved = without.price.gpu_required_bytes - chosen.price.gpu_required_bytes if without is not None else 0
        records += [_record(machine, technique, file, key, saved) for file, key in _KEYS[technique.dimension]]
    return tuple(sorted(records, key=lambda record: (record.rung, record.file, record.key)))


def _record(machine: Machine, technique: Technique, file: str, key: str, saved: int) -> Provenance:
    return Provenance(
        file=file,
        key=key,
        rung=machine.rungs[technique.name],
        technique=technique.name,
        account=technique.accounts[0].value,
        bytes_saved=max(0, saved),
    )


def used_facts(question: Question) -> dict[str, str]:
    """Returns the facts that the plan rests on, by key, for the lock."""
    model, gpu = question.model, question.gpu
    return {
        f"gpus.{gpu.key}.capacity_bytes": str(gpu.capacity_bytes),
        f"gpus.{gpu.key}.checked": gpu.checked,
        f"models.{model.key}.params": str(model.total_params),
        f"models.{model.key}.checked": model.checked,
    }
