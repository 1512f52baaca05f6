"""Published ratios of step times: a technique against its absence, under the conditions printed with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from memc.clock import clock_facts
from memc.clock.estimate import workload_seconds
from memc.clock.schedule import Elements
from memc.clock.workload import AdamKind, Compute, Kernels, Layout, Sharding, adam_bytes
from memc.config import Precision
from memc.facts import load_gpu, load_model

CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("clock").joinpath("ratios.yaml").read_text())
_LAYOUT = ("offload_activations",)


def _seconds(case: dict[str, Any], fields: dict[str, Any], ranks: int, *, hybrid: bool) -> float:
    """Returns the step's seconds of one side of a case; adapters sit on queries and values."""
    fields = dict(fields)
    own = {name: fields.pop(name) for name in _LAYOUT if name in fields}
    kind = AdamKind(fields.pop("adam", "fused"))
    model, gpu = load_model(case["model"], base_dir=Path()), load_gpu(case["gpu"])
    if "kernels" in fields:
        fields["kernels"] = Kernels(fields["kernels"])
    if fields.get("rank"):
        fields["adapted"] = frozenset(("q_proj", "v_proj"))
    base = Compute(
        samples=1, length=1, context=1, dtype="bf16", stream_bytes=2, autocast=False, trains=True, quantized=False
    )
    compute = replace(base, **fields, context=fields["length"], gathered=ranks > 1)
    per_node = case.get("gpus_per_node", 8)
    adapters = sum(
        compute.rank * (linear.in_features + linear.out_features) * count
        for linear, count in model.linear_modules()
        if linear.name in compute.adapted
    )
    layout = Layout(
        micro_batches=1,
        gpus_per_node=min(ranks, per_node),
        nodes=max(1, ranks // per_node),
        data_ranks=ranks,
        shard_ranks=min(ranks, per_node) if hybrid else ranks,
        sharding=Sharding.WEIGHTS if ranks > 1 else Sharding.NONE,
        gathers_in_forward=ranks > 1,
        reduce_every_pass=True,
        adam=kind,
        adam_bytes=adam_bytes(kind, weight=2, gradient=2, state=2, master=0),
        **own,
    )
    trainable = model.total_params if compute.trains else adapters
    elements = Elements(total=model.total_params, quantized=0, adapters=adapters, trainable=trainable)
    facts = clock_facts(gpu, Precision.BF16, ranks)
    return workload_seconds(model, compute, layout, elements, facts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_a_technique_costs_what_was_published(case: dict[str, Any]) -> None:
    ranks = case.get("ranks", 1)
    base = _seconds(case, case["base"], ranks, hybrid=case.get("hybrid_base", False))
    fields = {**case["base"], **case["variant"]}
    variant = _seconds(case, fields, case.get("variant_ranks", ranks), hybrid=False)
    assert variant / base == pytest.approx(case["ratio"], rel=case["within"])
