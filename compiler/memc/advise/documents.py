"""The answers as JSON-ready dictionaries: sizes in bytes, times in seconds, money in US dollars."""

from __future__ import annotations

from typing import Any

import memc
from memc.advise.attempt import Summary
from memc.advise.hardware import Row, Survey
from memc.advise.inverse import Solution, Tried
from memc.document import record_document, settings_document
from memc.spec import LoadedSpec

SOLVE_SCHEMA = "memc/solve/1"
HARDWARE_SCHEMA = "memc/hardware/1"


def solution_document(solution: Solution, loaded: LoadedSpec) -> dict[str, Any]:
    """Returns what `memc solve --json` prints."""
    return {
        "schema": SOLVE_SCHEMA,
        "memc": memc.__version__,
        "spec": {"name": loaded.name, "digest": loaded.spec.digest()},
        "quantity": solution.quantity.value,
        "feasible": solution.answer is not None,
        "answer": None if solution.answer is None else solution.answer.value,
        "plan": None if solution.answer is None else _summary(solution.answer.plan),
        "fails": _tried(solution.fails),
        "limit": solution.limit,
        "tried": [_tried(item) for item in solution.tried],
        "notes": list(solution.notes),
    }


def survey_document(survey: Survey, loaded: LoadedSpec) -> dict[str, Any]:
    """Returns what `memc hardware --json` prints."""
    return {
        "schema": HARDWARE_SCHEMA,
        "memc": memc.__version__,
        "spec": {"name": loaded.name, "digest": loaded.spec.digest()},
        "own": {
            "gpu": survey.card,
            "count": survey.count,
            "feasible": survey.shortfall is None,
            "plan": _summary(survey.own),
            "late": survey.late,
            "shortfall": None if survey.shortfall is None else record_document(survey.shortfall),
        },
        "rows": [_row(row) for row in survey.rows],
        "skipped": [record_document(item) for item in survey.skipped],
        "optimise": [record_document(item) for item in survey.optimise],
        "signals": [record_document(item) for item in survey.signals],
    }


def _summary(plan: Summary | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    document = record_document(plan)
    document["settings"] = settings_document(plan.config)
    del document["config"]
    return document


def _tried(item: Tried | None) -> dict[str, Any] | None:
    if item is None:
        return None
    return {
        "value": item.value,
        "size": item.size,
        "feasible": item.plan is not None,
        "plan": _summary(item.plan),
        "shortfall": None if item.shortfall is None else record_document(item.shortfall),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "gpu": row.card,
        "count": row.count,
        "capacity_bytes": row.capacity_bytes,
        "usd_per_gpu_hour": row.usd_per_gpu_hour,
        "feasible": row.plan is not None,
        "plan": _summary(row.plan),
        "shortfall": None if row.shortfall is None else record_document(row.shortfall),
        "break_even": None if row.break_even is None else record_document(row.break_even),
    }
