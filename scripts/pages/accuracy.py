"""The ledger beside what was traced: the cases of tests/cases, computed again when the site is built."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from memc.facts import load_gpu, load_model
from memc.ledger import Estimator, Moment, ledger_facts
from memc.ledger.layer import layer_mode, saved_tensors

from pages.text import heading, table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from agreement.cases import METHODS, Shape, cases, shapes  # noqa: E402
from agreement.compare import Comparison, Skipped, compare, summaries, summary  # noqa: E402
from agreement.traces import read_table  # noqa: E402
from differences import Summary  # noqa: E402

CASES = ROOT / "tests" / "cases"
GPU = "a100-sxm4-80gb"


def catalogue_section() -> str:
    """Returns tables of the ledger against the checked-in traces of the whole catalogue."""
    found, skipped, everything = catalogue()
    models = {key for item in found for key in item.shape.models}
    total = summary(found)
    columns = ["", "cases", "median", "90 % within", "most above", "most below"]
    stack = ", ".join(f"{name} {version}" for name, version in read_table().versions.items())
    kinds = {
        "family": lambda item: item.shape.model_type,
        "method": lambda item: item.mode.method,
        "checkpointing": lambda item: item.mode.checkpointing,
        "attention": lambda item: item.mode.attention,
        "sequences x tokens": lambda item: item.mode.shape,
    }
    parts = [
        f"{len(found):,} cases of {len(models)} models, traced with {stack}: the ledger's allocated peak of a step is "
        f"{total.median:.2%} off in the median, {total.p90:.2%} in nine of ten cases, {total.over:.2%} too high and "
        f"{-total.under:.2%} too low at the farthest.\n"
    ]
    for name, kind in kinds.items():
        parts.append(
            table([name, *columns[1:]], [_summary_row(*row) for row in summaries(found, kind).items()], columns[1:])
        )
    parts += [
        heading(3, "By family and method, median and farthest"),
        _family_table(found),
        _skipped_text(skipped, everything),
    ]
    return "\n".join(parts)


def catalogue() -> tuple[list[Comparison], list[Skipped], tuple[Shape, ...]]:
    """Returns every case of the catalogue that can be compared, and those that cannot."""
    everything = shapes()
    found, skipped = compare(cases(everything), read_table().peaks, {})
    return found, skipped, everything


def _summary_row(name: str, row: Summary) -> list[str]:
    return [name, f"{row.count:,}", f"{row.median:.2%}", f"{row.p90:.2%}", f"{row.over:+.2%}", f"{row.under:+.2%}"]


def _family_table(found: list[Comparison]) -> str:
    by_both = summaries(found, lambda item: f"{item.shape.model_type} {item.mode.method}")
    rows = []
    for family in sorted({item.shape.model_type for item in found}):
        of_family = [by_both.get(f"{family} {method}") for method in METHODS]
        rows.append([family, *("" if row is None else f"{row.median:.2%}, {row.worst:.2%}" for row in of_family)])
    return table(["family", *METHODS], rows, list(METHODS))


def _skipped_text(skipped: list[Skipped], everything: tuple[Shape, ...]) -> str:
    if not skipped:
        return f"All {len(everything)} shapes of the catalogue are compared in every mode."
    rows = Counter((item.reason, item.shape.model_type) for item in skipped)
    return "\n".join(
        [
            heading(3, "Not compared"),
            table(
                ["reason", "family", "cases"], [[*key, f"{count:,}"] for key, count in sorted(rows.items())], ["cases"]
            ),
        ]
    )


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
