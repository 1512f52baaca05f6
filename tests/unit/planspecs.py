"""Specs in words and the priced questions they ask, for tests of ladder, solver, clock and report."""

from __future__ import annotations

from pathlib import Path

from memc.facts import load_gpu, load_model
from memc.plan import Infeasible, Plan
from memc.solver.search import Machine
from memc.solver.solve import machine_for, solve
from memc.spec import LoadedSpec, parse_spec

_SPEC = """\
model: {model}
data: {{train: train.jsonl, max_length: {length}, samples: {samples}}}
method: {method}
training: {{global_batch_size: {batch}}}
hardware: {{gpu: {gpu}, count: {count}, nodes: {nodes}}}
"""
_DEFAULTS = {
    "model": "Qwen/Qwen2.5-7B",
    "length": "2048",
    "samples": "1000",
    "method": "lora",
    "batch": "16",
    "gpu": "rtx-4090",
    "count": "1",
    "nodes": "1",
}


def spec_text(*, host: str = "", more: str = "", **changes: str) -> str:
    """Returns a spec; `more` is appended, `host` is the host's memory."""
    assert set(changes) <= set(_DEFAULTS)
    text = _SPEC.format(**(_DEFAULTS | changes))
    if host:
        text = text.replace("count: ", f"host_memory: {host}, count: ")
    return text + more


def _loaded(text: str) -> LoadedSpec:
    return parse_spec(text, "spec.yaml")


def machine_of(text: str) -> Machine:
    """Returns the priced question of a spec."""
    loaded = _loaded(text)
    gpu, model = load_gpu(loaded.spec.hardware.gpu), load_model(loaded.spec.model, base_dir=Path())
    return machine_for(loaded, model, gpu, loaded.spec.data.samples)


def answer_to(text: str) -> Plan | Infeasible:
    """Returns the answer to a spec."""
    loaded = _loaded(text)
    gpu, model = load_gpu(loaded.spec.hardware.gpu), load_model(loaded.spec.model, base_dir=Path())
    return solve(loaded, model, gpu, loaded.spec.data.samples)


def plan_of(text: str) -> Plan:
    """Returns the plan of a spec that fits."""
    answer = answer_to(text)
    assert isinstance(answer, Plan)
    return answer


def refusal_of(text: str) -> Infeasible:
    """Returns the refusal of a spec that does not fit."""
    answer = answer_to(text)
    assert isinstance(answer, Infeasible)
    return answer
