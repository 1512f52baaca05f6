"""The run as it was asked for with one thing more: what memc itself says would make it fit."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memc import driver
from memc.facts import Objective, gpu_rows, load_model, model_rows
from memc.plan import Infeasible, Relaxation
from memc.units import GIB

from reported.answers import Answers, Asked, ask

# What changes least of what was asked for comes first; a method or a batch is asked for, memory is only there.
_ORDER = ("hardware.host_memory", "hardware.nvme", "hardware.gpu", "hardware.count", "hardware.nodes")


def with_files(answers: Answers) -> tuple[str, Asked] | None:
    """Returns what has files where neither the run as asked nor the plan with the choice left open has any.

    That is the run with what memc says would make it fit; for a model that memc prices and writes no training of, the
    same run of a causal language model, which holds for what every script has.

    Returns:
        What was changed, for display, and the answer; None when nothing helps.
    """
    found = with_room(answers)
    if found is not None or not any(map(_priced_only, (answers.asked, answers.open))):
        return found
    for whose, spec in (("as asked", answers.reading.asked), ("choice left open", answers.reading.open)):
        other = None if spec is None else _of_text(answers, spec, whose)
        if other is not None:
            return other
    return None


def _of_text(answers: Answers, spec: Mapping[str, Any], whose: str) -> tuple[str, Asked] | None:
    """Returns the run of a causal language model of about the size, where it is written."""
    asked = next(item for item in (answers.asked, answers.open) if item is not None and item.answer is not None)
    assert asked.answer is not None
    model = driver.facts_of(asked.answer.loaded)[1]
    routed = any(group.block.mlp.experts for group in model.groups)
    rows = sorted(model_rows(), key=lambda row: (abs(row.params / model.total_params - 1), row.key))
    for row in [row for row in rows if row.priced and 0.5 < row.params / model.total_params < 2]:
        facts = load_model(row.key, base_dir=Path())
        experts = any(group.block.mlp.experts for group in facts.groups)
        if facts.objective is not Objective.CAUSAL_LM or experts is not routed:
            continue
        changed = copy.deepcopy(dict(spec)) | {"model": row.key}
        changed["data"] = {key: value for key, value in changed["data"].items() if not key.startswith("image")}
        place = answers.folder / f"text-{whose.replace(' ', '-')}"
        other = ask(changed, place)
        for item, roomy in _relaxed(other.result, changed) if isinstance(other.result, Infeasible) else ():
            if not other.files:
                other = ask(roomy, place / item.input)
        return (f"{whose}, of {row.key}", other) if other.files else None
    return None


def _priced_only(asked: Asked | None) -> bool:
    """Whether a run has a plan or a refusal for want of memory, of a model that memc writes no training of."""
    if asked is None or asked.answer is None:
        return False
    written = (Objective.CAUSAL_LM, Objective.IMAGE_TEXT_LM)
    return driver.facts_of(asked.answer.loaded)[1].objective not in written


def with_room(answers: Answers) -> tuple[str, Asked] | None:
    """Returns the run as asked, else with the choice left open, with the first change offered that yields files.

    Of FSDP, the version that memc writes.

    Returns:
        What was changed, for display, and the answer; None when both have a plan or nothing that is offered helps.
    """
    for whose, asked, spec in (
        ("as asked", answers.asked, answers.reading.asked),
        ("choice left open", answers.open, answers.reading.open),
    ):
        if asked is None or spec is None or not isinstance(asked.result, Infeasible):
            continue
        for item, changed in _relaxed(asked.result, spec):
            other = ask(changed, answers.folder / f"room-{whose.replace(' ', '-')}-{item.input}")
            if other.files:
                return f"{whose} with {item.input} {item.needed}", other
    return None


def _relaxed(result: Infeasible, spec: Mapping[str, Any]) -> Iterator[tuple[Relaxation, dict[str, Any]]]:
    """Yields each change that a refusal offers with the spec that has it."""
    place = {name: number for number, name in enumerate(_ORDER)}
    for item in sorted(result.relaxations, key=lambda item: place.get(item.input, len(place))):
        value = _value(item, spec)
        section, _, name = item.input.partition(".")
        if value is None or not name:
            continue
        changed = copy.deepcopy(dict(spec))
        changed.setdefault(section, {})[name] = value
        changed.get("pin", {}).pop("fsdp_version", None)
        yield item, changed


def _value(item: Relaxation, spec: Mapping[str, Any]) -> Any:
    """Returns the value of a field that a change names; None when it is no single one."""
    if not item.needed:
        return None
    if item.input == "hardware.gpu":
        size = re.search(r"([\d.,]+) GiB", item.needed)
        return None if size is None else _card(float(size[1].replace(",", "")), str(spec["hardware"]["gpu"]))
    number = re.fullmatch(r"[\d,]+", item.needed)
    return int(item.needed.replace(",", "")) if number else item.needed if " " not in item.needed else None


def _card(gib: float, now: str) -> str | None:
    """Returns the smallest card of the catalogue with a capacity, one that knows the types of the card in use."""
    rows = {row.key: row.facts for row in gpu_rows()}
    bf16 = rows[now].bf16 if now in rows else False
    large = [
        (facts.capacity_bytes, key)
        for key, facts in rows.items()
        if facts.capacity_bytes is not None and facts.capacity_bytes >= gib * GIB and facts.bf16 >= bf16
    ]
    return min(large)[1] if large else None
