"""The ladder as pages: every technique with its accounts, needs, boundary, and the settings that it changes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from memc.config import Method, Offload
from memc.facts import load_gpu, load_model
from memc.ladder import LADDER, Situation, Technique
from memc.ladder.engines import under_deepspeed, under_fsdp
from memc.solver.provenance import technique_keys
from memc.solver.resolve import resolve
from memc.spec import parse_spec

from pages.text import heading, table

EXAMPLE = """
model: Qwen/Qwen2.5-7B
task: pretrain
data: {train: train.jsonl, max_length: 4096, samples: 1000}
method: [full, lora, qlora]
training: {global_batch_size: 16384}
hardware: {gpu: a100-sxm4-80gb, count: 8, host_memory: 1TiB, nvme: 8TB}
"""
WHY_THERE = {
    1: "bf16, SDPA attention and a fused optimizer cost nothing",
    2: "the same numbers without the logits of all tokens at once, or without a second model for DPO",
    3: "the same global batch in smaller pieces; nearly free until pieces get small",
    4: "repeats up to one forward pass; what is kept can also wait in host memory",
    5: "divides states over the GPUs; needs more than one",
    6: "cheap in time, but changes numerics",
    7: "changes what is trained; only where the spec allows it",
    8: "states lie in host memory: every step waits for PCIe and the CPU",
    9: "divides the weights too, over all GPUs or over those of a node, and gathers them in every pass",
    10: "GPUs share a sequence and pass keys and values around, or weights lie in host memory, which every pass reads",
    11: "states or weights lie on a disk, which every step or pass waits for",
}
"""Why each rung stands where it does, which its techniques do not say themselves."""


def rungs_section() -> str:
    """Returns a table of the rungs with their techniques and why they stand there.

    Raises:
        KeyError: When a rung has no reason.
    """
    rows: list[list[object]] = [[1, "as asked", WHY_THERE[1]]]
    for rung, techniques in _rungs():
        rows.append([rung, ", ".join(_linked(techniques, "../reference/techniques.md")), WHY_THERE[rung]])
    return table(["rung", "techniques", "why it stands there"], rows)


def ladder_section() -> str:
    """Returns a table of the rungs, then one section for each technique."""
    rows: list[list[object]] = [[1, "as asked", "bf16 where the card has it, SDPA attention, fused AdamW"]]
    for rung, techniques in _rungs():
        rows.append([rung, ", ".join(_linked(techniques, "")), f"first cuts {techniques[0].accounts[0].value}"])
    return "\n".join([table(["rung", "techniques", "what"], rows), *_sections()])


def _rungs() -> list[tuple[int, list[Technique]]]:
    rungs: defaultdict[int, list[Technique]] = defaultdict(list)
    for technique in LADDER:
        rungs[technique.rung].append(technique)
    return sorted(rungs.items())


def _linked(techniques: list[Technique], page: str) -> list[str]:
    """Returns the names of techniques as links to their sections; all kinds of accumulation under one name."""
    names = [f"[`{t.name}`]({page}#{t.name})" for t in techniques if not t.name.startswith("accumulate-")]
    whole = f"[`accumulate-2x` … `accumulate-1024x`]({page}#accumulate-2x)"
    return names + ([whole] if len(names) < len(techniques) else [])


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
    before, situation = _before(technique)
    written = technique_keys(technique, technique.apply(before, situation))
    keys = ", ".join(f"`{key}` in `{file}`" for file, key in written)
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
    before, situation = _before(technique)
    return _changed(before, technique.apply(before, situation))


def _before(technique: Technique) -> tuple[Any, Situation]:
    """Returns a configuration that the technique can be laid over: the example's, or one with what it builds on."""
    asked, situation = _example()
    zero3 = under_deepspeed(asked, replace(situation.zero, stage=3))
    bases = (
        asked,
        replace(asked, checkpoint_every=1),
        replace(asked, method=Method.LORA, lora=situation.lora),
        zero3,
        replace(zero3, zero=replace(situation.zero, stage=3, offload_optimizer=Offload.CPU)),
        under_fsdp(asked, situation.fsdp),
        replace(asked, nodes=2),
    )
    fitting = (base for base in bases if technique.why_not(base, situation) is None)
    return next(fitting, asked), situation


def _changed(before: Any, after: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in fields(after):
        old, new = getattr(before, field.name, None), getattr(after, field.name)
        if old == new:
            continue
        if hasattr(new, "__dataclass_fields__") and old is not None:
            found |= _changed(old, new)
        elif field.name == "fsdp":
            found |= {"fsdp_version": str(new.version)}
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
