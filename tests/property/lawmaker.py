"""Random specs for the laws: models, cards, lengths, batches and budgets, written as a user would."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from memc.config import Task
from memc.facts import ModelFacts, load_gpu, load_model
from memc.facts.classifiers import as_classifier
from memc.plan import Infeasible, Plan
from memc.solver.search import Machine
from memc.solver.solve import choose, machine_for, solve
from memc.spec import LoadedSpec, parse_spec

SpecDict = dict[str, Any]
CATALOGUE = ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B")
LARGE = ("Qwen/Qwen2.5-14B", "meta-llama/Llama-3.1-70B", "google/gemma-2-9b", "microsoft/Phi-3-mini-4k-instruct")
CARDS = ("t4", "rtx-4090", "v100-sxm2-32gb", "a100-sxm4-80gb", "h200-sxm-141gb")


@st.composite
def specs(
    draw: st.DrawFn,
    *,
    counts: tuple[int, ...] = (1, 1, 2, 8),
    node_counts: tuple[int, ...] = (1, 1, 1, 2, 4),
    **fixed: Any,
) -> SpecDict:
    """Draws a valid spec. `fixed` is laid over its top-level keys."""
    count = draw(st.sampled_from(counts))
    nodes = draw(st.sampled_from(node_counts))
    cards = count * nodes
    spec: SpecDict = {
        "model": draw(st.sampled_from(CATALOGUE + LARGE)),
        "task": draw(st.sampled_from(["sft", "sft", "pretrain"])),
        "data": {
            "train": "train.jsonl",
            "max_length": draw(st.sampled_from([128, 500, 1024, 2048, 4096])),
            "samples": draw(st.integers(1, 100_000)),
        },
        "method": draw(st.sampled_from(["full", "lora", "qlora", "auto", ["full", "lora"], ["lora", "qlora"]])),
        "training": {"global_batch_size": cards * draw(st.sampled_from([1, 2, 3, 8, 16, 48]))},
        "hardware": {"gpu": draw(st.sampled_from(CARDS)), "count": count, "nodes": nodes},
    }
    if draw(st.booleans()):
        spec["hardware"]["host_memory"] = f"{draw(st.sampled_from([32, 128, 512, 2000]))}GiB"
        if draw(st.booleans()):
            spec["hardware"]["nvme"] = f"{draw(st.sampled_from([200, 2000, 20000]))}GB"
    if draw(st.booleans()):
        spec["memory"] = {"target": f"{draw(st.integers(4, 14))}GiB"}
    if draw(st.integers(0, 3)) == 0:
        spec["time"] = {"budget": draw(st.sampled_from(["1h", "24h", "400h", "$20", "$2000"]))}
    return {**spec, **fixed}


WIDER = ("dpo", "classification", "images", "untimed", "fsdp", "context")


@st.composite
def wider_specs(draw: st.DrawFn, kinds: tuple[str, ...] = WIDER) -> SpecDict:
    """Draws a spec of what `specs` leaves out: other tasks, images, cards without rates, FSDP, shared sequences.

    Some contradict the facts: those are refused, as those of a user are.
    """
    kind = draw(st.sampled_from(kinds))
    spec: SpecDict = draw(specs(counts=(2, 8)) if kind in ("fsdp", "context") else specs())
    if kind == "dpo":
        spec["task"] = "dpo"
        if draw(st.booleans()):
            spec["pin"] = {"reference": "precomputed"}
    elif kind == "classification":
        spec["task"] = "classification"
        spec["model"] = draw(st.sampled_from([*CATALOGUE, "google-bert/bert-base-uncased", "FacebookAI/roberta-large"]))
        spec["data"]["max_length"] = draw(st.sampled_from([128, 500]))
    elif kind == "images":
        spec |= {"model": draw(st.sampled_from(["google/gemma-3-4b-pt", "Qwen/Qwen2-VL-2B-Instruct"])), "task": "sft"}
        spec["data"] |= {"images_per_sample": draw(st.integers(1, 3)), "max_length": 4096}
    elif kind == "untimed":
        spec["hardware"]["gpu"] = draw(st.sampled_from(["rtx-3080-laptop-16gb", "rtx-6000-ada", "rtx-2080-ti"]))
        spec.pop("time", None)
    else:
        spec["pin"] = {"engine": "fsdp"} if kind == "fsdp" else {"engine": "fsdp", "context_parallel": 2}
    return spec


def changed(spec: SpecDict, path: str, value: object) -> SpecDict:
    """Returns a copy of a spec with one field set, named as ``hardware.gpu``; None takes the field away."""
    copy = deepcopy(spec)
    *sections, name = path.split(".")
    owner = copy
    for section in sections:
        owner = owner.setdefault(section, {})
    if value is None:
        owner.pop(name, None)
    else:
        owner[name] = value
    return copy


def machine_of(spec: SpecDict) -> Machine:
    """Returns the priced question of a spec."""
    loaded = parse_spec(yaml.safe_dump(spec, sort_keys=False), "spec.yaml")
    return machine_for(loaded, _model(loaded), load_gpu(spec["hardware"]["gpu"]), loaded.spec.data.samples)


def solved(spec: SpecDict) -> Plan | Infeasible:
    """Returns the answer to a spec."""
    loaded = parse_spec(yaml.safe_dump(spec, sort_keys=False), "spec.yaml")
    return solve(loaded, _model(loaded), load_gpu(spec["hardware"]["gpu"]), loaded.spec.data.samples)


def _model(loaded: LoadedSpec) -> ModelFacts:
    model = load_model(loaded.spec.model, base_dir=Path())
    if loaded.spec.task is not Task.CLASSIFICATION:
        return model
    return as_classifier(model, loaded.spec.data.classes)


def rung_of(spec: SpecDict) -> int | None:
    """Returns the rung of the plan without building the plan; None when nothing fits."""
    machine = machine_of(spec)
    best = choose(machine)
    return None if best is None else best.candidate.rung


def config_json(folder: Path, **changes: int) -> str:
    """Writes the config.json of a small Llama-like model and returns its path."""
    config = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)
