"""Laws of the space: the product of frames and shapes is what plain enumeration finds, and its bounds hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lawmaker import SpecDict, changed, machine_of, specs
from memc.config import TrainingConfig
from memc.errors import MemcError
from memc.ladder import LADDER, Dimension, Technique
from memc.ledger import Estimator
from memc.solver.frames import Candidate
from memc.solver.resolve import Question
from memc.solver.search import Machine
from memc.solver.solve import TIE_SHARE, changed_numerics, choose
from memc.solver.warnings import open_bytes
from memc.spec import Objective

few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


def machine_or_none(spec: SpecDict) -> Machine | None:
    try:
        return machine_of(spec)
    except MemcError:
        return None


machines = specs().map(machine_or_none).filter(lambda machine: machine is not None)


def enumerated(question: Question) -> Iterator[tuple[TrainingConfig, tuple[Technique, ...]]]:
    """Yields every configuration that techniques lead to, one per dimension at most: the plain way, without sharing."""
    options = [
        [
            technique
            for technique in LADDER
            if technique.dimension is dimension
            and technique.name not in question.forbidden
            and dimension not in question.frozen
        ]
        for dimension in Dimension
    ]

    def extend(
        config: TrainingConfig, used: tuple[Technique, ...], depth: int
    ) -> Iterator[tuple[TrainingConfig, tuple[Technique, ...]]]:
        if depth == len(options):
            if question.required <= {technique.name for technique in used}:
                yield config, used
            return
        yield from extend(config, used, depth + 1)
        for technique in options[depth]:
            if technique.why_not(config, question.situation) is None:
                yield from extend(technique.apply(config, question.situation), (*used, technique), depth + 1)

    yield from extend(question.asked, (), 0)


@given(machines)
@few
def test_the_space_is_what_plain_enumeration_finds(machine: Machine) -> None:
    space = machine.space()
    found = {
        (frame.with_shape(shape), (*frame.techniques, *shape.techniques))
        for frame, line in space.pairs()
        for shape in line.shapes
    }
    assert found == set(enumerated(machine.question))
    assert space.considered == len(found)


@given(machines, st.data())
@few
def test_a_price_does_not_depend_on_what_was_priced_before(machine: Machine, data: st.DataObject) -> None:
    pairs = list(machine.space().pairs())
    for frame, line in data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=12)):
        candidate = frame.candidate(data.draw(st.sampled_from(line.shapes)))
        alone = Estimator(machine.question.model, machine.estimator.facts).price(candidate.config)
        shared = candidate.price
        assert alone.gpu_required_bytes == shared.gpu_required_bytes
        assert alone.host_required_bytes == shared.host_required_bytes
        assert alone.nvme_required_bytes == shared.nvme_required_bytes
        assert alone.ledger() == shared.ledger()


@given(machines, st.data())
@few
def test_the_bounds_hold_and_memory_never_falls_along_a_line(machine: Machine, data: st.DataObject) -> None:
    pairs = list(machine.space().pairs())
    for frame, line in data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=12)):
        before = frame.bound(line.shapes[0])
        for shape in line.shapes:
            totals, bound = frame.totals(shape), frame.bound(shape)
            assert bound.gpu <= totals.gpu
            assert bound.host <= totals.host
            assert bound.nvme <= totals.nvme
            enough = replace(machine.question.budget, gpu_bytes=totals.gpu, host_bytes=None, nvme_bytes=totals.nvme)
            assert frame.may_fit(shape, enough)
            assert before.gpu <= totals.gpu
            assert before.host <= totals.host
            before = totals
        micro = [frame.with_shape(shape).micro_batch_size for shape in line.shapes]
        assert micro == sorted(micro)


def chosen_plainly(machine: Machine, candidates: list[Candidate]) -> Candidate | None:
    """Returns the choice by its definition, every configuration priced and timed."""
    question = machine.question
    left = [candidate for candidate in candidates if machine.fits(candidate)]
    left = [candidate for candidate in left if machine.in_time(machine.time(candidate.config))]
    if not left:
        return None
    if question.loaded.spec.objective is Objective.LOWEST_RUNG:
        for key in (
            lambda item: item.rung,
            lambda item: question.situation.methods.index(item.config.method),
            lambda item: changed_numerics(item.config, question.asked),
        ):
            least = min(map(key, left))
            left = [candidate for candidate in left if key(candidate) == least]

    def seconds(candidate: Candidate) -> float:
        return machine.time(candidate.config).step_seconds / candidate.config.global_batch_size

    sure = [item for item in left if not open_bytes(question.budget, item.price.ledger())]
    left = sure or left
    fastest = min(map(seconds, left))
    close = [candidate for candidate in left if seconds(candidate) <= fastest * TIE_SHARE]
    return min(close, key=lambda item: (len(item.techniques), seconds(item), item.price.gpu_required_bytes))


@given(specs(), st.sampled_from(["lowest-rung", "lowest-rung", "fastest", "cheapest"]))
@few
def test_the_choice_is_that_of_its_definition(spec: SpecDict, objective: str) -> None:
    machine = machine_or_none(changed(spec, "objective", objective))
    assume(machine is not None)
    assert machine is not None
    assume(machine.space().considered < 6000)
    best = choose(machine)
    plain = chosen_plainly(machine, machine.space().candidates())
    assert (best is None) == (plain is None)
    if best is not None and plain is not None:
        assert best.candidate.rung == plain.rung
        assert best.time.step_seconds == machine.time(plain.config).step_seconds
        assert len(best.candidate.techniques) == len(plain.techniques)
        assert best.candidate.price.gpu_required_bytes == plain.price.gpu_required_bytes
