"""What if: the plan itself at its own settings, structure kept at others, and records that travel as JSON unharmed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from memc.clock import clock_facts
from memc.config import Engine, FsdpConfig
from memc.document import ledger_document, record_document
from memc.ledger import Estimator, ledger_facts
from memc.plan import Infeasible, Plan
from memc.transfer import pack, unpack
from memc.verdict import plan_verdict
from memc.whatif import Knobs, WhatIf, answered, what_if
from planspecs import plan_of, spec_text


def question_of(plan: Plan, *, masks: bool = True, evaluation: int | None = 0) -> WhatIf:
    parts = {
        "model": plan.model,
        "facts": ledger_facts(plan.gpu),
        "rates": tuple(clock_facts(plan.gpu, plan.config.precision, cards) for cards in (1, 2)),
        "config": plan.config,
        "masks": masks,
        "evaluation": evaluation,
    }
    return what_if(json.loads(json.dumps({name: pack(value) for name, value in parts.items()})))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(spec_text())


@pytest.fixture(scope="module")
def sharded() -> Plan:
    return plan_of(spec_text(method="full", gpu="a100-sxm4-80gb", count="8", host="2000GiB"))


def test_records_survive_the_journey(plan: Plan, sharded: Plan) -> None:
    for record in (plan.model, plan.gpu, plan.config, sharded.config, ledger_facts(plan.gpu)):
        again = unpack(json.loads(json.dumps(pack(record))))
        assert again == record
        assert record_document(again) == record_document(record)


def test_what_is_no_record_of_the_ledger_does_not_travel(plan: Plan) -> None:
    with pytest.raises(TypeError, match="Plan is no record"):
        pack(plan)


def test_at_its_own_settings_the_plan_comes_back(plan: Plan, sharded: Plan) -> None:
    for solved in (plan, sharded):
        question = question_of(solved, masks=not solved.config.packing)
        assert question.varied(question.knobs()) == solved.config
        answer = answered(question, record_document(question.knobs()))
        assert answer["ledger"] == ledger_document(solved.ledger)
        assert answer["clock"]["step_seconds"] == round(solved.clock.step_seconds, 6)


def test_samples_of_a_step_stay_the_same_and_the_rest_of_the_plan_too(plan: Plan) -> None:
    question = question_of(plan)
    batch = plan.config.global_batch_size
    for cards in question.choices(1)["cards"]:
        for size in question.choices(cards)["micro_batch_size"]:
            knobs = Knobs(cards=cards, micro_batch_size=size, max_length=512, lora_rank=8)
            config = question.varied(knobs)
            assert config.global_batch_size == batch
            assert config.padding_mask == (size > 1)
            assert config.engine is (Engine.SINGLE if cards == 1 else Engine.DDP)
            assert config.lora is not None and config.lora.rank == 8
            assert (config.checkpoint_every, config.optimizer) == (plan.config.checkpoint_every, plan.config.optimizer)


def test_a_micro_batch_that_does_not_divide_gives_way_to_a_smaller_one(plan: Plan) -> None:
    question = question_of(
        replace(plan, config=replace(plan.config, micro_batch_size=1, gradient_accumulation_steps=12))
    )
    for asked, used in ((5, 4), (12, 12), (99, 12), (7, 6)):
        assert question.varied(replace(question.knobs(), micro_batch_size=asked)).micro_batch_size == used


def test_sharding_over_one_card_is_not_offered(sharded: Plan) -> None:
    question = question_of(sharded)
    assert sharded.config.zero_stage
    counts = question.choices(8)["cards"]
    assert 1 not in counts
    assert sharded.config.world_size in counts
    assert all(sharded.config.global_batch_size % count == 0 for count in counts)
    assert question.choices(8)["lora_rank"] == []


def test_lengths_stop_where_the_model_does(plan: Plan) -> None:
    lengths = question_of(plan).choices(1)["max_length"]
    assert plan.config.max_length in lengths
    assert plan.model.max_position_embeddings is not None
    assert max(lengths) <= plan.model.max_position_embeddings


def test_evaluation_follows_the_micro_batch_unless_pinned(plan: Plan) -> None:
    knobs = Knobs(cards=1, micro_batch_size=2, max_length=512, lora_rank=8)
    assert question_of(plan, evaluation=None).varied(knobs).eval_batch_size == 2
    assert question_of(plan, evaluation=1).varied(knobs).eval_batch_size == 1
    assert question_of(plan, evaluation=0).varied(knobs).eval_batch_size == 0


def test_more_work_never_costs_less(plan: Plan) -> None:
    question = question_of(plan)
    estimator = Estimator(plan.model, ledger_facts(plan.gpu))
    start = question.knobs()
    for knob in ("micro_batch_size", "max_length", "lora_rank"):
        sizes = [
            estimator.price(question.varied(replace(start, **{knob: value}))).gpu_required_bytes
            for value in question.choices(1)[knob][:20]
        ]
        assert sizes == sorted(sizes), knob


def test_the_verdict_of_the_plan_file_is_that_of_the_terminal(plan: Plan) -> None:
    from memc.render.notes import notes

    assert not isinstance(plan, Infeasible)
    assert notes(plan)["verdict"] == plan_verdict(plan)


@pytest.mark.parametrize("share", [1, 4])
def test_fsdp_plans_keep_their_engine_and_their_samples(sharded: Plan, share: int) -> None:
    settings = FsdpConfig()
    config = replace(
        sharded.config, engine=Engine.FSDP, zero=None, fsdp=settings, context_parallel=share, micro_batch_size=1
    )
    config = replace(config, gradient_accumulation_steps=4 * share)
    question = question_of(replace(sharded, config=config))
    offered = question.choices(8)["cards"]
    assert 8 in offered
    assert 1 not in offered
    for cards in offered:
        assert cards % share == 0
        for size in question.choices(cards)["micro_batch_size"]:
            knobs = Knobs(cards=cards, micro_batch_size=size, max_length=config.max_length, lora_rank=0)
            varied = question.varied(knobs)
            assert (varied.engine, varied.fsdp) == (Engine.FSDP, settings)
            assert varied.global_batch_size == config.global_batch_size
            assert varied.micro_batch_size == size
