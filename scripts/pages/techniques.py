"""The ladder as pages: every technique with its accounts, needs, boundary, and the settings that it changes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from memc.facts import load_gpu, load_model
from memc.ladder import LADDER, Situation, Technique
from memc.solver.provenance import _KEYS
from memc.solver.resolve import resolve
from memc.spec import parse_spec

from pages.text import heading, table

EXAMPLE = """
model: Qwen/Qwen2.5-7B
task: pretrain
data: {train: train.jsonl, max_length: 4096, samples: 1000}
method: [full, lora, qlora]
training: {global_batch_size: 16384}
hardware: {gpu: a100-sxm4-80gb, count: 8, host_memory: 1TiB}
"""


def ladder_section() -> str:
    """Returns a table of the rungs, then one section for each technique."""
    rungs: defaultdict[int, list[Technique]] = defaultdict(list)
    for technique in LADDER:
        rungs[technique.rung].append(technique)
    rows: list[list[object]] = [[1, "as asked", "bf16 where the card has it, SDPA attention, fused AdamW"]]
    for rung, techniques in sorted(rungs.items()):
        names = [f"[`{t.name}`](#{_anchor(t)})" for t in techniques if not t.name.startswith("accumulate-")]
        names += ["[`accumulate-2x` … `accumulate-1024x`](#accumulate-2x)"] if len(names) < len(techniques) else []
        rows.append([rung, ", ".join(names), f"first cuts {techniques[0].accounts[0].value}"])
    return "\n".join([table(["rung", "techniques", "what"], rows), *_sections()])


def _anchor(technique: Technique) -> str:
    return technique.name


def _sections() -> list[str]:
    parts = []
    for technique in LADDER:
        if technique.name.startswith("accumulate-") and technique.name != "accumulate-2x":
            continue
        parts += [heading(2, f"`{technique.name}` {{ #{technique.name} }}"), _facts(technique)]
        if technique.name == "accumulate-2x":
            others = [t.name for t in LADDER if t.name.startswith("accumulate-")]
            parts.append("The same with other divisors: " + ", ".join(f"`{name}`" for name in others) + ".\n")
    return parts


def _facts(technique: Technique) -> str:
    keys = ", ".join(f"`{key}` in `{file}`" for file, key in _KEYS[technique.dimension])
    rows: list[list[object]] = [
        ["rung", technique.rung],
        ["accounts", ", ".join(f"`{account.value}`" for account in technique.accounts)],
        ["fidelity", technique.fidelity.value],
        ["needs", technique.needs],
        ["boundary", technique.boundary],
        ["excludes", f"other techniques that decide `{technique.dimension.value}`"],
        ["settings", ", ".join(f"`{name}: {value}`" for name, value in technique_settings(technique).items())],
        ["written to", keys],
    ]
    return table(["", ""], rows)


def technique_settings(technique: Technique) -> dict[str, str]:
    """Returns what a technique changes in the configuration of an example, as setting → new value."""
    asked, situation = _example()
    before = replace(asked, zero=replace(situation.zero, stage=3)) if technique.name == "offload-param" else asked
    return _changed(before, technique.apply(before, situation))


def _changed(before: Any, after: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in fields(after):
        old, new = getattr(before, field.name, None), getattr(after, field.name)
        if old == new:
            continue
        if hasattr(new, "__dataclass_fields__") and old is not None:
            found |= _changed(old, new)
        elif field.name == "zero":
            found |= {"zero_stage": str(new.stage)} | _offloads(new)
        elif field.name == "lora":
            found |= {"lora_rank": str(new.rank), "lora_alpha": str(new.alpha)}
        else:
            found[field.name] = str(new)
    return found


def _offloads(zero: Any) -> dict[str, str]:
    names = ("offload_optimizer", "offload_param")
    return {name: str(getattr(zero, name)) for name in names if str(getattr(zero, name)) != "none"}


def _example() -> tuple[Any, Situation]:
    from memc.ledger import ledger_facts

    loaded = parse_spec(EXAMPLE, "example.yaml")
    gpu = load_gpu(loaded.spec.hardware.gpu)
    model = load_model(loaded.spec.model, base_dir=Path())
    question = resolve(loaded, model, gpu, ledger_facts(gpu), loaded.spec.data.samples)
    return question.asked, question.situation
