"""Laws of the bill: it adds up, it never shrinks when the work grows, and a technique moves only what it names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lawmaker import SpecDict, changed, config_json, machine_of, solved, specs
from memc.config import Engine, Optimizer, TrainingConfig
from memc.document import EXPLAIN_SCHEMA, explain_document
from memc.errors import MemcError
from memc.ladder import LADDER, Technique
from memc.ledger import Account, Ledger, Moment, Resource
from memc.plan import Infeasible, Plan
from memc.solver.search import Candidate, Machine

some = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
EIGHT_BIT = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)


def machine_or_none(spec: SpecDict) -> Machine | None:
    try:
        return machine_of(spec)
    except MemcError:
        return None


machines = specs().map(machine_or_none).filter(lambda machine: machine is not None)


def any_candidate(machine: Machine, data: st.DataObject) -> Candidate:
    """Draws one configuration of the ladder."""
    candidates = machine.space().candidates()
    return candidates[data.draw(st.integers(0, len(candidates) - 1), label="candidate")]


def required(machine: Machine, config: TrainingConfig) -> tuple[int, int, int]:
    price = machine.estimator.price(config)
    return price.gpu_required_bytes, price.gpu_reserved_bytes, price.host_required_bytes


@given(machines, st.data())
@some
def test_entries_sum_to_the_peak(machine: Machine, data: st.DataObject) -> None:
    candidate = any_candidate(machine, data)
    price, ledger = candidate.price, candidate.price.ledger()
    for resource in Resource:
        bill = ledger.of(resource)
        inside = [entry for entry in bill.entries if entry.in_allocator]
        cached = [entry for entry in bill.entries if entry.is_cached]
        outside = sum(entry.bytes for entry in bill.entries if not entry.in_allocator and not entry.is_cached)
        alive = {moment: sum(entry.bytes for entry in inside if moment in entry.moments) for moment in Moment}
        assert bill.peak_allocated_bytes == max(alive.values())
        held = {
            moment: size + sum(entry.bytes for entry in cached if moment in entry.moments)
            for moment, size in alive.items()
        }
        assert bill.peak_reserved_bytes == max(held.values())
        assert bill.required_bytes == max(held.values()) + outside
        assert bill.by_phase() == {
            phase: max(alive[moment] for moment in Moment if moment.phase is phase) for phase in bill.by_phase()
        }
        assert held[bill.binding_moment] == max(held.values())
        assert sum(bill.by_account().values()) == bill.required_bytes
    assert price.gpu_required_bytes == ledger.gpu.required_bytes
    assert price.gpu_reserved_bytes == ledger.gpu.peak_reserved_bytes
    assert price.host_required_bytes == ledger.host.required_bytes


@given(machines, st.data())
@some
def test_every_entry_says_what_it_is_and_where_it_comes_from(machine: Machine, data: st.DataObject) -> None:
    ledger = any_candidate(machine, data).price.ledger()
    for resource in Resource:
        names = [entry.name for entry in ledger.of(resource).entries]
        assert len(set(names)) == len(names)
        for entry in ledger.of(resource).entries:
            assert isinstance(entry.bytes, int)
            assert entry.bytes > 0
            assert entry.formula.strip()
            assert entry.source.strip()
            assert entry.moments or not entry.in_allocator
            assert entry.uncertainty_bytes >= 0
            assert bool(entry.uncertainty_bytes) == bool(entry.uncertainty)


GROWTH: tuple[tuple[str, Any], ...] = (
    ("micro_batch_size", lambda c, by: replace(c, micro_batch_size=c.micro_batch_size + by)),
    ("max_length", lambda c, by: replace(c, max_length=c.max_length + by)),
    ("eval_batch_size", lambda c, by: replace(c, eval_batch_size=c.eval_batch_size + by)),
    ("lora_rank", lambda c, by: c.lora and replace(c, lora=replace(c.lora, rank=c.lora.rank + by))),
)


@pytest.mark.parametrize(("name", "grow"), GROWTH, ids=[name for name, _ in GROWTH])
@given(machine=machines, data=st.data(), by=st.integers(1, 300))
@some
def test_more_work_never_costs_fewer_bytes(
    name: str, grow: Any, machine: Machine, data: st.DataObject, by: int
) -> None:
    config = any_candidate(machine, data).config
    # 8-bit optimizers keep small tensors at 32 bits: a larger rank can make a tensor large enough to shrink.
    assume(name != "lora_rank" or config.optimizer not in EIGHT_BIT)
    larger = grow(config, by)
    assume(larger is not None)
    before, after = required(machine, config), required(machine, larger)
    assert all(less <= more for less, more in zip(before, after, strict=True)), (name, config)


@pytest.mark.parametrize(
    ("key", "step"),
    [("num_hidden_layers", 1), ("intermediate_size", 16), ("vocab_size", 64), ("hidden_size", 64)],
)
@given(spec=specs(task="sft"), data=st.data(), times=st.integers(1, 5))
@settings(
    some, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture], max_examples=15
)
def test_a_larger_model_never_costs_fewer_bytes(
    tmp_path: Path, key: str, step: int, spec: SpecDict, data: st.DataObject, times: int
) -> None:
    sizes = {"num_hidden_layers": 4, "intermediate_size": 688, "vocab_size": 1000, "hidden_size": 256}
    small = machine_of({**spec, "model": config_json(tmp_path / "small")})
    large = machine_of({**spec, "model": config_json(tmp_path / "large", **{key: sizes[key] + step * times})})
    candidate = any_candidate(small, data)
    assume(key != "hidden_size" or candidate.config.optimizer not in EIGHT_BIT)
    config = candidate.config
    before, after = required(small, config), required(large, config)
    assert all(less <= more for less, more in zip(before, after, strict=True)), config


def under_the_same_engine(machine: Machine, before: TrainingConfig, after: TrainingConfig) -> TrainingConfig:
    """Returns `before` as it would run under the engine that `after` needs, without what the technique is for."""
    if after.engine is before.engine or after.engine is not Engine.DEEPSPEED:
        return before
    zero = replace(machine.question.situation.zero, stage=0)
    return replace(before, engine=after.engine, zero=zero, lora=after.lora)


def sums(ledger: Ledger, resource: Resource, account: Account) -> dict[Moment, int]:
    return {moment: ledger.of(resource).by_account(moment)[account] for moment in Moment}


def applicable(machine: Machine, candidate: Candidate) -> list[Technique]:
    """Returns the techniques that can be laid over a configuration: one of each kind at most."""
    taken = {technique.dimension for technique in candidate.techniques}
    free = [technique for technique in LADDER if technique.dimension not in taken]
    return [technique for technique in free if technique.why_not(candidate.config, machine.question.situation) is None]


@given(machine=machines, data=st.data())
@settings(some, max_examples=80)
def test_a_technique_changes_only_the_accounts_it_names(machine: Machine, data: st.DataObject) -> None:
    """On the GPU, beside workspace: that is where buffers and transients of the step stand.

    A technique that needs DeepSpeed is compared with DeepSpeed without it: the engine itself changes data types.
    """
    candidate = any_candidate(machine, data)
    config, techniques = candidate.config, applicable(machine, candidate)
    assume(techniques)
    technique = data.draw(st.sampled_from(techniques), label="technique")
    after = technique.apply(config, machine.question.situation)
    before = under_the_same_engine(machine, config, after)
    old, new = machine.estimator.ledger(before), machine.estimator.ledger(after)
    allowed = {*technique.accounts, Account.WORKSPACE}
    moved = {
        account
        for account in Account
        if sums(old, Resource.GPU, account) != sums(new, Resource.GPU, account) and account not in allowed
    }
    assert not moved, f"{technique.name} moves {sorted(moved)}"


@given(machine=machines, data=st.data())
@settings(some, max_examples=80)
def test_a_technique_leaves_the_samples_of_a_step_and_the_machine_alone(machine: Machine, data: st.DataObject) -> None:
    candidate = any_candidate(machine, data)
    config, techniques = candidate.config, applicable(machine, candidate)
    assume(techniques)
    technique = data.draw(st.sampled_from(techniques), label="technique")
    after = technique.apply(config, machine.question.situation)
    assert after != config
    for name in ("global_batch_size", "world_size", "nodes", "max_length", "task", "packing", "attention"):
        assert getattr(after, name) == getattr(config, name), name
    assert (after.lora is None) == (after.method.value == "full")
    assert (after.zero is None) == (after.engine is not Engine.DEEPSPEED)


CONTRACT = {
    "peak_allocated_bytes": int,
    "peak_reserved_bytes": int,
    "required_bytes": int,
    "binding_phase": str,
    "by_phase": dict,
    "by_account": dict,
}


def document_of(answer: Plan | Infeasible) -> dict[str, Any]:
    return explain_document(answer, spec_digest="0" * 64, resolved={})


@given(specs())
@some
def test_the_document_survives_json_and_keeps_its_contract(spec: SpecDict) -> None:
    try:
        answer = solved(spec)
    except MemcError:
        assume(False)
    document = document_of(answer)
    text = json.dumps(document, sort_keys=True, allow_nan=False)
    assert json.loads(text) == document
    assert json.dumps(document_of(solved(spec)), sort_keys=True) == text
    assert document["schema"] == EXPLAIN_SCHEMA == "memc/explain/1"
    assert document["feasible"] is isinstance(answer, Plan)
    assert (document["infeasible"] is None) is document["feasible"]
    assert isinstance(document["plan"]["settings"], dict)
    assert (document["plan"]["rung"] is None) is not document["feasible"]
    for resource in ("gpu", "host", "nvme"):
        ledger = document["ledger"][resource]
        for name, kind in CONTRACT.items():
            assert isinstance(ledger[name], kind), name
        assert max(ledger["by_phase"].values()) == ledger["peak_allocated_bytes"]  # in another phase where holes bind
        assert sum(ledger["by_account"].values()) == ledger["required_bytes"]
    clock = document["clock"]
    assert clock["step_seconds"] > 0
    assert clock["tokens_per_second_per_gpu"] > 0
    assert clock["total_seconds"] is None or clock["total_seconds"] > 0
    assert document["trail"]


@given(spec=specs(), length=st.integers(128, 4096))
@some
def test_a_longer_step_of_the_same_plan_never_takes_less_time(spec: SpecDict, length: int) -> None:
    machine = machine_or_none(changed(spec, "data.max_length", 2048))
    assume(machine is not None)
    assert machine is not None
    config = machine.question.asked
    counts = machine.estimator.counts(config)
    shorter, longer = sorted((2048, length))
    times = [
        machine.clock.step_time(replace(config, max_length=size), counts).step_seconds for size in (shorter, longer)
    ]
    assert 0 < times[0] <= times[1] * (1 + 1e-9)
