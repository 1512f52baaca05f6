"""Gradients and buckets of DistributedDataParallel, as rehearsals of it hold them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from memc.config import Engine, Method
from memc.facts import load_gpu, load_model
from memc.ledger import Estimator, Moment, ledger_facts
from memc.ledger.entries import Account
from planmaker import make_config

MODEL = "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize(("passes", "views", "sets"), [(1, True, 1), (2, True, 2), (1, False, 2), (2, False, 2)])
def test_gradients_lie_beside_their_buckets_where_passes_add_up(passes: int, views: bool, sets: int) -> None:
    """A pass that does not reduce makes gradients of its own: views of the buckets save nothing then."""
    model = load_model(MODEL, base_dir=Path())
    config = replace(
        make_config(method=Method.FULL),
        engine=Engine.DDP,
        gpus_per_node=2,
        gradient_accumulation_steps=passes,
        gradient_as_bucket_view=views,
    )
    gpu = Estimator(model, ledger_facts(load_gpu("h100-sxm5-80gb"))).ledger(config).gpu
    names = ("ddp-buckets", "gradients-head", "gradients-layers", "gradients-lowest-layer", "gradients-embedding")
    held = sum(entry.bytes for entry in gpu.entries if entry.name in names)
    assert held == sets * 4 * model.total_params
    assert gpu.by_account(Moment.LOAD)[Account.GRADIENTS if views else Account.WORKSPACE] >= 4 * model.total_params
