"""The ledger beside what was traced: the cases of tests/cases, computed again when the site is built."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import yaml
from memc.facts import load_gpu, load_model
from memc.ledger import Estimator, Moment, ledger_facts
from memc.ledger.layer import layer_mode, saved_tensors

from pages.text import heading, table

CASES = Path(__file__).resolve().parents[2] / "tests" / "cases"
GPU = "a100-sxm4-80gb"


def accuracy_section() -> str:
    """Returns tables of step peaks, bytes per layer and parameter counts, traced and computed."""
    steps, layers, counts = step_rows(), layer_rows(), parameter_rows()
    worst = max(abs(float(row[5].rstrip("%"))) for row in steps)
    exact = sum(row[2] == row[3] for row in layers)
    equal = sum(row[1] == row[2] for row in counts)
    columns = ["case", "model", "moment", "traced MiB", "ledger MiB", "difference"]
    return "\n".join(
        [
            heading(2, "Peaks of a step"),
            f"{len(steps)} peaks; the largest difference is {worst:.2f} %.\n",
            table(columns, steps, columns[3:]),
            heading(2, "What a layer keeps for backward"),
            f"Bytes per token of one layer; {exact} of {len(layers)} are equal to the byte.\n",
            table(["case", "model", "traced", "ledger"], layers, ["traced", "ledger"]),
            heading(2, "Parameters"),
            f"Unique elements; {equal} of {len(counts)} are equal.\n",
            table(["model", "built", "counted"], [[m, f"{b:,}", f"{c:,}"] for m, b, c in counts], ["built", "counted"]),
        ]
    )


def step_rows() -> list[tuple[str, str, str, str, str, str]]:
    """Returns case, model, moment, traced MiB, ledger MiB and the difference, as text."""
    module, rows = _case_module(), []
    for case in _cases("ledger/steps.yaml"):
        config = module.configuration(case)
        estimator = Estimator(load_model(case["model"], base_dir=Path()), ledger_facts(load_gpu(GPU)))
        ledger = estimator.ledger(config).gpu
        outside = next(entry.bytes for entry in ledger.entries if entry.name == "cublas-workspaces")
        for moment, measured in case["mib"].items():
            ours = (ledger.by_moment[Moment(moment)] - outside) / 2**20
            difference = f"{ours / measured - 1:+.2%}"
            rows.append((case["name"], case["model"], moment, f"{measured:,}", f"{ours:,.0f}", difference))
    return rows


def layer_rows() -> list[tuple[str, str, str, str]]:
    """Returns case, model, traced and computed bytes per token of one layer, as text."""
    module, rows = _case_module(), []
    for case in _cases("ledger/layers.yaml"):
        config, model = module.configuration(case), load_model(case["model"], base_dir=Path())
        block = model.groups[0].block
        names = {
            "h": model.hidden_size,
            "q": block.attention.query_width,
            "k": block.attention.key_width,
            "n": block.attention.heads,
            "i": block.mlp.intermediate,
            "r": config.lora.rank if config.lora is not None else 0,
            "T": config.max_length,
        }
        measured = eval(case["bytes"], {"__builtins__": {}}, names)
        ours = sum(item.bytes_per_token for item in saved_tensors(block, layer_mode(config)))
        rows.append((case["name"], case["model"], f"{measured:,}", f"{ours:,}"))
    return rows


def parameter_rows() -> list[tuple[str, int, int]]:
    """Returns model, parameters as built, parameters as counted."""
    cases = _cases("parameters.yaml")
    return [(case["model"], case["params"], load_model(case["model"], base_dir=Path()).total_params) for case in cases]


def _cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = yaml.safe_load((CASES / name).read_text(encoding="utf-8"))["cases"]
    return cases


def _case_module() -> Any:
    """Returns the module that turns a case into a configuration, so that page and test read it alike."""
    spec = importlib.util.spec_from_file_location("ledger_cases", CASES / "test_ledger_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
