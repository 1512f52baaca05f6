"""The answers for a terminal: the answer first, then the figures behind it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from memc.advise.attempt import Summary
from memc.advise.economics import run_length
from memc.advise.hardware import Row, Saving, Survey
from memc.advise.inverse import Quantity, Solution, Tried
from memc.units import GIB, format_gib, format_seconds
from memc.verdict import describe

_GAP = "  "
_UPGRADES = 12
_ORDER = {
    Quantity.MAX_LENGTH: "longest",
    Quantity.MICRO_BATCH_SIZE: "largest",
    Quantity.MODEL: "largest",
    Quantity.GPU: "cheapest",
    Quantity.COUNT: "fewest",
}


def solution_lines(solution: Solution) -> list[str]:
    """Returns the answer to an inverse question."""
    quantity, answer, fails = solution.quantity, solution.answer, solution.fails
    if answer is None or answer.plan is None:
        lines = [f"NOTHING FITS: no {quantity} has a plan"]
        if fails is not None:
            lines.append(f"NEAREST: {_value(fails)}: {solution.limit}")
    else:
        lines = [f"{quantity}: {_value(answer)} is the {_ORDER[quantity]} that fits", plan_line(answer.plan)]
        lines.append(
            f"NEXT: {_value(fails)} fails: {solution.limit}" if fails is not None else f"NEXT: {solution.limit}"
        )
    if solution.tried:
        lines += [
            "",
            *_table([("", quantity.value, "rung", "needs", "run", "cost", "why not"), *map(_line, solution.tried)]),
        ]
    return lines + [f"note: {note}" for note in solution.notes]


def plan_line(plan: Summary) -> str:
    """Returns a plan on one line."""
    return (
        f"PLAN: {format_gib(plan.required_bytes)} of {format_gib(plan.budget_bytes)}, rung {plan.rung}, "
        f"{_step(plan)}{_run(plan)}: {describe(plan.config)}"
    )


def _step(plan: Summary) -> str:
    """Returns the time of a step before that of the run; nothing where either is unknown."""
    if plan.step_seconds is None or plan.total_seconds is None:
        return ""
    return f"{format_seconds(plan.step_seconds)} per step, "


def survey_lines(survey: Survey) -> list[str]:
    """Returns the catalogue priced for one spec."""
    fitting = [row for row in survey.rows if row.plan is not None]
    lines = [*_best_lines(survey, fitting), ""]
    for signal in survey.signals:
        mark = {True: "YES", False: "no", None: "unknown"}[signal.raised]
        lines.append(f"signal {signal.name}: {mark}: {signal.sentence}")
    if fitting:
        head = ("gpu", "GPUs", "rung", "needs GiB", "of", "s/step", "run", "cost", "techniques")
        lines += ["", "what fits, by cost, then by time", *_table([head, *map(_row, fitting)])]
    lines += ["", "optimise, or upgrade", *_two_columns(survey, fitting)]
    lines += _break_even_lines(survey, fitting)
    return lines + _rest_lines(survey)


def _value(item: Tried) -> str:
    return str(item.value)


def _run(plan: Summary) -> str:
    cost = f", about ${plan.total_usd:,.2f}" if plan.total_usd is not None else ""
    return run_length(plan) + (" in all" if plan.total_seconds is not None else "") + cost


def _cost(plan: Summary) -> str:
    return "-" if plan.total_usd is None else f"${plan.total_usd:,.2f}"


def _line(item: Tried) -> tuple[str, ...]:
    plan = item.plan
    if plan is None:
        return ("-", str(item.value), "", "", "", "", item.shortfall.sentence if item.shortfall else "")
    return ("fits", str(item.value), str(plan.rung), format_gib(plan.required_bytes), run_length(plan), _cost(plan), "")


def _best_lines(survey: Survey, fitting: Sequence[Row]) -> list[str]:
    own = survey.own
    lines = []
    if not fitting:
        lines.append("NOTHING FITS: no card of the catalogue has a plan")
    priced = [row for row in fitting if row.plan is not None and row.plan.total_usd is not None]
    if priced:
        lines.append(f"CHEAPEST: {_named(priced[0])}")
    timed = [
        (seconds, row.card, row)
        for row in fitting
        if row.plan is not None and (seconds := row.plan.total_seconds or row.plan.step_seconds) is not None
    ]
    if timed:
        lines.append(f"FASTEST: {_named(min(timed, key=lambda item: item[:2])[2])}")
    if own is None:
        why = survey.shortfall.sentence if survey.shortfall is not None else ""
        lines.append(f"OWN: {survey.count} x {survey.card} does not fit: {why}")
    else:
        late = f"; but {survey.late}" if survey.late else ""
        lines.append(f"OWN: {survey.count} x {survey.card}: {_run(own)}, rung {own.rung}{late}")
    return lines


def _named(row: Row) -> str:
    assert row.plan is not None
    return f"{row.count} x {row.card}: {_run(row.plan)}, rung {row.plan.rung}"


def _row(row: Row) -> tuple[str, ...]:
    plan = row.plan
    assert plan is not None
    return (
        row.card,
        str(row.count),
        str(plan.rung),
        f"{plan.required_bytes / GIB:.2f}",
        f"{plan.budget_bytes / GIB:.2f}",
        "unknown" if plan.step_seconds is None else f"{plan.step_seconds:.2f}",
        run_length(plan) if plan.total_seconds is not None else "-",
        _cost(plan),
        ", ".join(plan.techniques) or "as asked",
    )


def _two_columns(survey: Survey, fitting: Sequence[Row]) -> list[str]:
    """Returns each rung with what it saves and takes, beside each card in the spec's own number."""
    optimise = [("rung", "saves", "step takes", ""), *map(_saving, survey.optimise)]
    others = [row for row in fitting if row.count == survey.count and row.card != survey.card]
    upgrade = [("upgrade to", "run", "cost"), *(_upgrade(row) for row in others[: max(_UPGRADES, len(optimise))])]
    left, right = _table(optimise), _table(upgrade)
    width = max(map(len, left))
    lines = [f"{a.ljust(width)} | {b}".rstrip() for a, b in zip_longest(left, right, fillvalue="")]
    rest = len(others) - (len(upgrade) - 1)
    return lines if rest <= 0 else [*lines, f"{' ' * width} | and {rest} more above"]


def _saving(item: Saving) -> tuple[str, ...]:
    mark = "-> " if item.verdict == "chosen" else ""
    slower = "unknown" if item.slowdown is None else f"x{item.slowdown:.2f}"
    return f"{mark}{item.rung} {item.technique}", format_gib(item.saved_bytes), slower, item.verdict


def _upgrade(row: Row) -> tuple[str, ...]:
    assert row.plan is not None
    return f"{row.count} x {row.card}", run_length(row.plan), _cost(row.plan)


def _break_even_lines(survey: Survey, fitting: Sequence[Row]) -> list[str]:
    gains = [(row, row.break_even) for row in fitting if row.break_even is not None]
    if not gains:
        why = (
            "the spec's own hardware has no plan" if survey.own is None else "no other run's length and price are known"
        )
        return ["", f"break-even of an upgrade: {why}, so there is nothing to compare with"]
    gains.sort(key=lambda item: (-item[1].net_usd, item[0].card, item[0].count))
    head = ("upgrade", "price", "hours saved", "run saves", "debugging", "deadline", "gain", "price/gain", "net")
    rows = [head]
    for row, gain in gains[:_UPGRADES]:
        ratio = "-" if gain.ratio is None else f"{gain.ratio:.2f}"
        money = (gain.time_usd, gain.debugging_usd, gain.deadline_usd, gain.gain_usd)
        cells = [f"{row.count} x {row.card}", _usd(gain.upgrade_usd), f"{gain.hours_saved:.1f}", *map(_usd, money)]
        rows.append((*cells, ratio, _usd(gain.net_usd)))  # type: ignore[arg-type]
    pays = sum(gain.net_usd > 0 for _, gain in gains)
    title = f"break-even from {survey.count} x {survey.card}: {pays} of {len(gains)} upgrades pay within this run"
    rest = len(gains) - _UPGRADES
    return ["", title, *_table(rows), *([f"and {rest} more that gain less"] if rest > 0 else [])]


def _usd(amount: float) -> str:
    return f"-${-amount:,.2f}" if amount < 0 else f"${amount:,.2f}"


def _rest_lines(survey: Survey) -> list[str]:
    """Returns what does not fit, one line a card, and what was skipped, one line a reason."""
    lines: list[str] = []
    short: dict[str, list[Row]] = {}
    for row in survey.rows:
        if row.shortfall is not None:
            short.setdefault(row.card, []).append(row)
    if short:
        lines += ["", f"does not fit: {sum(map(len, short.values()))} of {len(survey.rows)}"]
    for card, rows in short.items():
        lines.append(
            f"  {card}: " + "; ".join(f"{row.count} x: {row.shortfall.sentence}" for row in rows if row.shortfall)
        )
    reasons: dict[str, list[str]] = {}
    for item in survey.skipped:
        reasons.setdefault(item.code, []).append(
            f"{item.card}: {item.reason}" if item.card else f"{item.count} GPUs: {item.reason}"
        )
    if reasons:
        lines += ["", f"skipped: {len(survey.skipped)}"]
    for code, sentences in reasons.items():
        lines += [f"  {code} ({len(sentences)})", *(f"    {sentence}" for sentence in sentences)]
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as aligned lines; the first is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [_GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
