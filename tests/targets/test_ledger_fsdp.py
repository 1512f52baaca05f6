"""The ledger's FSDP2 entries against a live run of the real thing, shard by shard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fsdp_live import MODEL, TOKENS
from memc.config import Engine, FsdpConfig, LossHead, Method, TrainingConfig
from memc.facts import load_gpu, load_model
from memc.ledger.constants import ledger_facts
from memc.ledger.entries import Moment
from memc.ledger.estimate import Estimator
from planmaker import make_config, make_lora
from torch_extensions import framework_environment

_MOMENTS = (
    Moment.FORWARD,
    Moment.LOSS,
    Moment.BACKWARD_FIRST_LAYER,
    Moment.BACKWARD_LAST_LAYER,
    Moment.BACKWARD_EMBEDDING,
    Moment.STEP,
)


def _config(ranks: int, method: Method, *, reshard: bool) -> TrainingConfig:
    return make_config(
        engine=Engine.FSDP,
        method=method,
        gpus_per_node=ranks,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        max_length=TOKENS,
        loss=LossHead.PLAIN,
        checkpoint_every=0,
        eval_batch_size=0,
        packing=False,
        lora=make_lora(rank=16) if method is Method.LORA else None,
        fsdp=FsdpConfig(reshard_after_forward=reshard),
    )


def _estimated(config: TrainingConfig, folder: Path) -> dict[Moment, int]:
    """Returns live bytes by moment, without what only a GPU has."""
    path = folder / "config.json"
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}
    path.write_text(json.dumps(MODEL | shape | {"rms_norm_eps": 1e-6}))
    gpu = load_gpu("a100-sxm4-80gb")
    ledger = Estimator(load_model(str(path), base_dir=folder), ledger_facts(gpu)).ledger(config).gpu
    own = [entry for entry in ledger.entries if entry.in_allocator and "cublas" not in entry.name]
    return {moment: sum(entry.bytes for entry in own if moment in entry.moments) for moment in _MOMENTS}


@pytest.mark.parametrize(
    ("ranks", "method", "reshard"),
    [(8, Method.FULL, True), (4, Method.LORA, True), (8, Method.FULL, False)],
    ids=["full", "lora", "full-kept-weights"],
)
def test_the_ledger_holds_what_fsdp_holds(ranks: int, method: Method, reshard: bool, tmp_path: Path) -> None:
    program = Path(__file__).with_name("fsdp_live.py")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(ranks), method.value, str(reshard).lower()],
        capture_output=True,
        text=True,
        env=framework_environment(),
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    live = json.loads(run.stdout.splitlines()[-1])
    estimated = _estimated(_config(ranks, method, reshard=reshard), tmp_path)
    assert estimated[Moment.STEP] == pytest.approx(live["step"], rel=0.002)
    peak = max(live.values())
    assert 0.99 * peak <= max(estimated.values()) <= 1.03 * peak
