"""Laws of advice: an answer fits and what lies beyond it does not; a card that is said to fit has a plan."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from lawmaker import SpecDict, changed, solved, specs
from memc.advise import Costs, Desk, Quantity, solve_for, survey
from memc.facts import load_gpu, load_model
from memc.plan import Infeasible, Plan
from memc.spec import parse_spec
from yaml import safe_dump


def desk_of(spec: SpecDict) -> Desk:
    loaded = parse_spec(safe_dump(spec, sort_keys=False), "spec.yaml")
    model = load_model(spec["model"], base_dir=Path())
    return Desk(loaded, model, load_gpu(spec["hardware"]["gpu"]), loaded.spec.data.samples)


@settings(max_examples=15, deadline=None)
@given(spec=specs(), beyond=st.integers(1, 40))
def test_the_longest_sequence_fits_and_a_longer_one_does_not(spec: SpecDict, beyond: int) -> None:
    solution = solve_for(desk_of(spec), Quantity.MAX_LENGTH)
    if solution.answer is not None:
        assert isinstance(solved(changed(spec, "data.max_length", solution.answer.value)), Plan)
    if solution.fails is not None:
        assert isinstance(solved(changed(spec, "data.max_length", solution.fails.value)), Infeasible)
    positions = load_model(spec["model"], base_dir=Path()).max_position_embeddings or 2**24
    base = int(solution.answer.value) if solution.answer is not None else 0
    longer = min(base + 64 * beyond, positions)
    if longer > base and "time" not in spec:
        assert isinstance(solved(changed(spec, "data.max_length", longer)), Infeasible)


@settings(max_examples=6, deadline=None)
@given(spec=specs(counts=(1, 2)), pick=st.integers(0, 10**6))
def test_a_card_that_fits_has_a_plan(spec: SpecDict, pick: int) -> None:
    own = spec["hardware"]
    rows = survey(desk_of(spec), (own["count"],), Costs()).rows
    row = rows[pick % len(rows)]
    other = changed(changed(spec, "hardware.gpu", row.card), "hardware.count", row.count)
    if row.card != own["gpu"]:
        other = changed(other, "memory", None)
    answer = solved(other)
    assert isinstance(answer, Plan) == (row.plan is not None)
    if isinstance(answer, Plan) and row.plan is not None:
        assert answer.config == row.plan.config
        assert answer.ledger.gpu.required_bytes == row.plan.required_bytes
