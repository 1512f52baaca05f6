"""The laws of the solver for what the other specs leave out: preference pairs, classes, images, FSDP, untimed cards."""

from __future__ import annotations

from types import FunctionType

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lawmaker import wider_specs
from test_laws_solver import (
    OBJECTIVES,
    test_a_plan_is_no_worse_than_a_thousand_random_configurations,
    test_a_plan_stays_within_every_budget,
    test_below_its_rung_nothing_fits,
    test_more_memory_of_the_card_never_climbs_higher,
    test_ruling_a_technique_out_never_yields_a_better_plan,
    test_the_trail_tells_every_rung_once_and_agrees_with_the_plan,
    try_solve,
)
from test_laws_space import (
    machine_or_none,
    test_a_price_does_not_depend_on_what_was_priced_before,
    test_the_bounds_hold_and_memory_never_falls_along_a_line,
    test_the_choice_is_that_of_its_definition,
)

few = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
answered = wider_specs().map(lambda spec: (spec, try_solve(spec))).filter(lambda pair: pair[1] is not None)
machines = wider_specs().map(machine_or_none).filter(lambda machine: machine is not None)


def held(law: object, *strategies: st.SearchStrategy[object]) -> object:
    """Returns a law as a test over other specs than its own."""
    inner = law.hypothesis.inner_test  # type: ignore[attr-defined]
    plain = FunctionType(inner.__code__, inner.__globals__, inner.__name__)  # without the settings of the first test
    plain.__annotations__ = inner.__annotations__
    return few(given(*strategies)(plain))


test_a_wider_plan_stays_within_every_budget = held(test_a_plan_stays_within_every_budget, answered)
test_below_the_rung_of_a_wider_plan_nothing_fits = held(test_below_its_rung_nothing_fits, answered)
test_more_memory_never_climbs_higher_in_a_wider_plan = held(
    test_more_memory_of_the_card_never_climbs_higher, answered, st.integers(1, 40)
)
test_the_trail_of_a_wider_plan_agrees_with_it = held(
    test_the_trail_tells_every_rung_once_and_agrees_with_the_plan, answered
)
test_a_wider_plan_is_no_worse_than_random_configurations = held(
    test_a_plan_is_no_worse_than_a_thousand_random_configurations,
    wider_specs(),
    st.sampled_from(OBJECTIVES),
    st.randoms(use_true_random=False),
)
test_ruling_out_never_yields_a_better_wider_plan = held(
    test_ruling_a_technique_out_never_yields_a_better_plan, wider_specs(), st.sampled_from(OBJECTIVES), st.data()
)
test_the_bounds_of_a_wider_space_hold = held(
    test_the_bounds_hold_and_memory_never_falls_along_a_line, machines, st.data()
)
test_a_wider_price_does_not_depend_on_what_was_priced_before = held(
    test_a_price_does_not_depend_on_what_was_priced_before, machines, st.data()
)
test_the_choice_in_a_wider_space_is_that_of_its_definition = held(
    test_the_choice_is_that_of_its_definition, wider_specs(), st.sampled_from(OBJECTIVES)
)

for _imported in [name for name in globals() if name.startswith("test_") and "wider" not in name]:
    del globals()[_imported]  # those have tests of their own
