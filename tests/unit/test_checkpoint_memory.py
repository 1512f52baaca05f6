"""What saving and resuming hold: each figure follows from who copies what in the libraries' own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from memc.config import Engine, FsdpConfig, Offload, Optimizer, TrainingConfig, ZeroConfig
from memc.facts import load_gpu, load_model
from memc.ledger.entries import Ledger, Moment, Resource
from memc.solver.search import Machine
from memc.solver.solve import machine_for
from memc.spec import parse_spec

ZERO = ZeroConfig(
    stage=2,
    reduce_bucket_elements=10**8,
    allgather_bucket_elements=10**8,
    prefetch_elements=10**7,
    persistence_elements=10**5,
    max_live_elements=10**9,
    sub_group_elements=10**9,
    overlap_comm=False,
)
TIED, UNTIED = "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B"


def machine(model: str, method: str, count: int) -> Machine:
    spec = {
        "model": model,
        "task": "sft",
        "data": {"train": "train.jsonl", "max_length": 512, "samples": 1000},
        "method": method,
        "training": {"global_batch_size": 8 * count},
        "hardware": {"gpu": "h200-sxm-141gb", "count": count},
    }
    loaded = parse_spec(yaml.safe_dump(spec), "spec.yaml")
    return machine_for(loaded, load_model(model, base_dir=Path()), load_gpu("h200-sxm-141gb"), 1000)


def deepspeed(config: TrainingConfig, **zero: object) -> TrainingConfig:
    settings = replace(ZERO, **zero)  # type: ignore[arg-type]
    return replace(config, engine=Engine.DEEPSPEED, zero=settings, fsdp=None, optimizer=Optimizer.ADAMW)


def plain(config: TrainingConfig, optimizer: Optimizer = Optimizer.ADAMW) -> TrainingConfig:
    engine = Engine.SINGLE if config.world_size == 1 else Engine.DDP
    return replace(config, engine=engine, zero=None, fsdp=None, optimizer=optimizer)


def priced(
    model: str, method: str, count: int, change: Callable[[TrainingConfig], TrainingConfig]
) -> tuple[Ledger, TrainingConfig, Machine]:
    found = machine(model, method, count)
    config = change(found.question.asked)
    return found.estimator.ledger(config), config, found


def held(ledger: Ledger, name: str, resource: Resource = Resource.HOST) -> int:
    return sum(entry.bytes for entry in ledger.of(resource).entries if entry.name == name)


@pytest.mark.parametrize("model", [TIED, UNTIED])
def test_below_zero_3_every_rank_copies_its_model_to_save_it(model: str) -> None:
    ledger, _, found = priced(model, "full", 4, deepspeed)
    facts = found.estimator.model
    whole = 2 * facts.total_params
    twice = 2 * facts.vocab_size * facts.hidden_size if facts.tied else 0
    assert held(ledger, "weights-being-saved") == 4 * (whole + twice)


def test_frozen_weights_are_copied_too_though_adapters_alone_are_written() -> None:
    sharded, _, found = priced(UNTIED, "lora", 4, deepspeed)
    alone, _, _ = priced(UNTIED, "lora", 4, plain)
    assert held(sharded, "weights-being-saved") >= 4 * 2 * found.estimator.model.total_params
    assert held(alone, "weights-being-saved") < found.estimator.model.total_params // 10


def test_under_zero_3_rank_0_gathers_weights_or_every_rank_writes_a_storage_of_states() -> None:
    ledger, _, found = priced(UNTIED, "full", 8, lambda config: deepspeed(config, stage=3))
    total = found.estimator.model.total_params
    assert held(ledger, "weights-being-saved") == 2 * total
    storages = 8 * 4 * min(-(-total // 8), ZERO.sub_group_elements)
    assert held(ledger, "state-being-written") == max(0, storages - 2 * total) > 0
    offloaded, _, _ = priced(
        UNTIED, "full", 8, lambda config: deepspeed(config, stage=3, offload_optimizer=Offload.CPU)
    )
    assert held(offloaded, "state-being-written") == 0  # states are on the host already


@pytest.mark.parametrize(("stage", "count"), [(2, 2), (2, 8), (3, 8)])
def test_deepspeed_reads_weights_then_states_on_every_rank(stage: int, count: int) -> None:
    ledger, _, found = priced(UNTIED, "full", count, lambda config: deepspeed(config, stage=stage))
    total = found.estimator.model.total_params
    states = count * 12 * -(-total // count)
    weights = count * 2 * total if stage < 3 else 0
    assert held(ledger, "state-being-read") == max(states, weights)


def test_states_on_drives_are_copied_as_files() -> None:
    nvme, _, _ = priced(UNTIED, "full", 8, lambda config: deepspeed(config, stage=3, offload_optimizer=Offload.NVME))
    assert held(nvme, "state-being-read") == 0


def test_a_single_process_reads_states_to_the_host_and_several_to_their_gpus() -> None:
    single, _, found = priced(TIED, "full", 1, plain)
    assert held(single, "state-being-read") == 2 * 4 * found.estimator.model.total_params  # in the weights' own type
    several, _, _ = priced(TIED, "full", 2, plain)
    assert held(several, "state-being-read") == 0
    assert held(several, "moments-being-read", Resource.GPU) == 0


@pytest.mark.parametrize(("optimizer", "copies"), [(Optimizer.ADAMW_8BIT, 1), (Optimizer.PAGED_ADAMW_8BIT, 2)])
def test_bitsandbytes_copies_what_it_reads_and_pages_it_no_more(optimizer: Optimizer, copies: int) -> None:
    single, _, _ = priced(TIED, "full", 1, lambda config: plain(config, optimizer))
    several, _, _ = priced(TIED, "full", 2, lambda config: plain(config, optimizer))
    moments = held(single, "state-being-read") // 2
    assert held(several, "moments-being-read", Resource.GPU) == copies * moments
    entry = next(entry for entry in several.of(Resource.GPU).entries if entry.name == "moments-being-read")
    assert entry.moments == {Moment.RESUME}


@pytest.mark.parametrize("sharded", [True, False])
def test_fsdp_holds_weights_or_moments_whichever_are_more(sharded: bool) -> None:
    def change(config: TrainingConfig) -> TrainingConfig:
        fsdp = FsdpConfig(sharded_checkpoints=sharded)
        return replace(config, engine=Engine.FSDP, zero=None, fsdp=fsdp, optimizer=Optimizer.ADAMW)

    full, _, found = priced(UNTIED, "full", 8, change)
    total = found.estimator.model.total_params
    moments = held(full, "state-being-read")
    assert moments % 2 == 0
    assert held(full, "state-being-saved") == moments >= 2 * 2 * total
    adapters, _, _ = priced(UNTIED, "lora", 8, change)
    assert held(adapters, "state-being-read") < 2 * total // 10  # frozen weights are in no checkpoint
    assert held(adapters, "state-being-saved") >= 2 * total  # but are gathered at the end of the run


def test_zero_3_has_one_module_whole_on_the_gpu_while_it_saves() -> None:
    ledger, _, found = priced(UNTIED, "full", 4, lambda config: deepspeed(config, stage=3))
    facts = found.estimator.model
    assert held(ledger, "module-being-saved", Resource.GPU) == 2 * facts.vocab_size * facts.hidden_size
    lower, _, _ = priced(UNTIED, "full", 4, deepspeed)
    assert held(lower, "module-being-saved", Resource.GPU) == 0


def test_all_experts_of_a_layer_are_one_module_under_zero_3() -> None:
    ledger, config, found = priced("mistralai/Mixtral-8x7B-v0.1", "lora", 8, lambda config: deepspeed(config, stage=3))
    block = found.estimator.model.groups[0].block
    experts = 8 * 3 * 4096 * 14336 + 8 * 4096
    assert block.routing_params == experts
    assert held(ledger, "module-being-saved", Resource.GPU) == 2 * experts
    assert config.zero is not None and experts > config.zero.max_live_elements
    last = max(linear.weight_params for linear in block.linears)  # what is gathered ahead is gathered whole
    assert held(ledger, "gathered-parameters", Resource.GPU) == 2 * (experts + config.zero.prefetch_elements + last)


def test_fsdp_gathers_one_tensor_at_a_time_to_save_it() -> None:
    def sharded(config: TrainingConfig) -> TrainingConfig:
        return replace(config, engine=Engine.FSDP, zero=None, fsdp=FsdpConfig(version=2), optimizer=Optimizer.ADAMW)

    full, _, found = priced(UNTIED, "full", 4, sharded)
    largest = found.estimator.model.vocab_size * found.estimator.model.hidden_size
    assert held(full, "tensor-being-saved", Resource.GPU) == 4 * largest
    adapters, _, _ = priced(UNTIED, "lora", 4, sharded)
    assert held(adapters, "tensor-being-saved", Resource.GPU) == 2 * largest
