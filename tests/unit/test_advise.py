"""Advice: the inverse questions, the catalogue priced for one spec, the break-even and the three signals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from memc.advise import Costs, Desk, Quantity, solve_for, survey
from memc.cli import main
from memc.errors import MemcError
from memc.facts import load_gpu, load_model
from memc.spec import parse_spec
from planspecs import plan_of, refusal_of, spec_text


def desk_of(text: str) -> Desk:
    loaded = parse_spec(text, "spec.yaml")
    spec = loaded.spec
    model, gpu = load_model(spec.model, base_dir=Path()), load_gpu(spec.hardware.gpu)
    return Desk(loaded, model, gpu, spec.data.samples)


def test_the_longest_sequence_is_exact_to_one_step() -> None:
    solution = solve_for(desk_of(spec_text()), Quantity.MAX_LENGTH)
    assert solution.answer is not None
    assert solution.fails is not None
    assert int(solution.fails.value) - int(solution.answer.value) == 64
    plan_of(spec_text(length=str(solution.answer.value)))
    refusal = refusal_of(spec_text(length=str(solution.fails.value)))
    assert solution.fails.shortfall is not None
    assert solution.fails.shortfall.bytes == refusal.shortfall_bytes > 0


def test_the_positions_of_a_small_model_end_the_search() -> None:
    text = spec_text(model="HuggingFaceTB/SmolLM2-135M", gpu="a100-sxm4-80gb")
    solution = solve_for(desk_of(text), Quantity.MAX_LENGTH)
    assert solution.answer is not None
    assert solution.answer.value == load_model("HuggingFaceTB/SmolLM2-135M", base_dir=Path()).max_position_embeddings
    assert solution.fails is None
    assert "positions" in solution.limit


def test_the_largest_micro_batch_fits_and_the_next_divisor_does_not() -> None:
    solution = solve_for(desk_of(spec_text(length="4096")), Quantity.MICRO_BATCH_SIZE)
    assert solution.answer is not None
    assert solution.fails is not None
    assert solution.fails.value == 2 * int(solution.answer.value)
    pinned = "pin: {{micro_batch_size: {}}}"
    plan_of(spec_text(length="4096", more=pinned.format(solution.answer.value)))
    refusal_of(spec_text(length="4096", more=pinned.format(solution.fails.value)))


def test_models_of_the_family_are_tried_by_size() -> None:
    solution = solve_for(desk_of(spec_text()), Quantity.MODEL)
    sizes = [item.size for item in solution.tried]
    assert sizes == sorted(sizes, key=lambda size: size or 0)
    assert solution.answer is not None
    assert solution.fails is not None
    plan_of(spec_text(model=str(solution.answer.value)))
    refusal_of(spec_text(model=str(solution.fails.value)))


def test_fewest_cards_and_the_number_before_it() -> None:
    solution = solve_for(desk_of(spec_text(method="full", gpu="a100-sxm4-80gb")), Quantity.COUNT)
    assert solution.answer is not None
    plan_of(spec_text(method="full", gpu="a100-sxm4-80gb", count=str(solution.answer.value)))
    dense = solve_for(desk_of(spec_text(method="full")), Quantity.COUNT)
    assert dense.fails is not None
    refusal_of(spec_text(method="full", count=str(dense.fails.value)))


def test_rows_cover_the_catalogue_and_stand_by_money() -> None:
    found = survey(desk_of(spec_text()), (1, 2), Costs())
    cards = {row.card for row in found.rows} | {item.card for item in found.skipped}
    from memc.facts import gpu_keys

    assert cards == set(gpu_keys())
    money = [row.plan.total_usd for row in found.rows if row.plan is not None and row.plan.total_usd is not None]
    assert money == sorted(money)
    assert len(found.signals) == 3
    assert any(item.saved_bytes > 0 and item.slowdown > 1 for item in found.optimise)


def test_break_even_is_gain_less_price() -> None:
    costs = Costs(any_upgrade=500.0, engineer_hour=80.0, debug_hours=10.0)
    found = survey(desk_of(spec_text()), (1,), costs)
    gains = [(row, row.break_even) for row in found.rows if row.break_even is not None]
    assert gains
    assert found.own is not None
    for row, gain in gains:
        assert row.plan is not None
        assert gain.upgrade_usd == 500.0 * row.count
        assert gain.net_usd == pytest.approx(gain.time_usd + gain.debugging_usd - gain.upgrade_usd)
        assert gain.debugging_usd == (800.0 if row.plan.rung < found.own.rung else 0.0)
    assert {gain.net_usd > 0 for _, gain in gains} == {True, False}


def test_a_deadline_counts_only_where_it_is_kept() -> None:
    text = spec_text(samples="200000", more="time: {budget: 24h}")
    found = survey(desk_of(text), (1, 8), Costs(deadline=5000.0))
    assert found.late is not None
    kept = {row.break_even.deadline_usd for row in found.rows if row.break_even is not None}
    assert kept == {5000.0}
    with pytest.raises(MemcError, match=r"time\.budget is no duration"):
        survey(desk_of(spec_text()), (1,), Costs(deadline=5000.0))


def test_heavy_offload_raises_its_signal() -> None:
    text = spec_text(method="full", host="256GiB", more="ladder: {require: [offload-param]}")
    found = {item.name: item for item in survey(desk_of(text), (1,), Costs()).signals}
    assert found["mostly-offloaded"].raised is True
    assert found["beyond-sharding-and-too-slow"].raised is None
    light = {item.name: item for item in survey(desk_of(spec_text()), (1,), Costs()).signals}
    assert light["mostly-offloaded"].raised is False


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [(["solve", "{}", "count"], "memc/solve/1"), (["hardware", "{}", "--counts", "1"], "memc/hardware/1")],
)
def test_the_commands_print_json(
    arguments: list[str], schema: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(spec_text(), encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main([*(word.format(path) for word in arguments), "--json"])
    assert stop.value.code == 0
    assert json.loads(capsys.readouterr().out)["schema"] == schema


def test_nothing_fits_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(spec_text(method="full", more="memory: {target: 1GiB}"), encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["solve", str(path), "max_length"])
    assert stop.value.code == 3
    assert capsys.readouterr().out.startswith("NOTHING FITS")
