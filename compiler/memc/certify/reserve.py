"""What the allocator held over what tensors held in the user's own runs, in a plan that no trace tells it of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memc.config import TrainingConfig
from memc.facts.records import GpuFacts, MeasuredFigure
from memc.ledger.entries import ALLOCATOR, Account, Entry, Grade, Ledger, Moment, Resource, resource_ledger
from memc.plan import Infeasible, Plan
from memc.units import format_gib

_MOST_ROUNDS = 4
_NAME = f"{ALLOCATOR}measured-reserve"

Solver = Callable[[int], Plan | Infeasible]
"""Solves the spec with so many bytes of the GPU's budget kept free."""


def reserve_ratio(gpu: GpuFacts, config: TrainingConfig) -> MeasuredFigure | None:
    """Returns how much the allocator held over what was allocated in the user's runs on a card; None when unknown."""
    fixed = "" if config.expandable_segments else "_fixed_segments"
    return gpu.measured(f"reserved_over_allocated{fixed}")


def with_measured_reserve(solve: Solver, result: Plan | Infeasible) -> Plan | Infeasible:
    """Returns an answer that has room for what the allocator holds, as the user's own runs show it.

    A traced plan is left alone: the allocator was replayed for it, which tells more than other runs. One that has no
    room for the median of those runs is solved again with that kept free.

    Args:
        solve: Solves the spec.
        result: What it answered with nothing kept free.
    """
    margin_bytes = 0
    for _ in range(_MOST_ROUNDS):
        if isinstance(result, Infeasible) or result.traced is not None:
            return result
        ratio = reserve_ratio(result.gpu, result.config)
        if ratio is None:
            return result
        plan = replace(
            result,
            ledger=_with_entry(result.ledger, ratio),
            budget=replace(result.budget, gpu_bytes=result.budget.gpu_bytes + margin_bytes),
        )
        short = plan.ledger.gpu.required_bytes - plan.budget.gpu_bytes
        if short <= 0:
            return plan
        margin_bytes = plan.ledger.gpu.required_bytes - result.ledger.gpu.required_bytes
        reason = (
            f"{', '.join(plan.techniques) or 'as asked'} would need {format_gib(plan.ledger.gpu.required_bytes)} of "
            f"{format_gib(plan.budget.gpu_bytes)} with {format_gib(margin_bytes)} more in the allocator, as in the "
            f"median of {ratio.count} runs measured on {plan.gpu.key}"
        )
        result = _saying(solve(margin_bytes), reason)
    return result


def _saying(result: Plan | Infeasible, reason: str) -> Plan | Infeasible:
    if isinstance(result, Infeasible):
        return replace(result, causes=(reason, *result.causes))
    return replace(result, warnings=(reason, *result.warnings))


def _with_entry(ledger: Ledger, ratio: MeasuredFigure) -> Ledger:
    """Returns a ledger whose allocator holds as much over the allocated peak as it did in the user's runs.

    Source: torch.cuda.max_memory_reserved over max_memory_allocated of the measured runs; the median, and how far the
        farthest run lies from it.
    """
    bill = ledger.gpu
    peak = bill.peak_allocated_bytes
    held = round((ratio.median - 1) * peak) - bill.reserved_above_allocated_bytes
    entry = Entry(
        name=_NAME,
        account=Account.WORKSPACE,
        resource=Resource.GPU,
        bytes=max(0, held),
        moments=frozenset(Moment),
        formula=f"({ratio.median:.4f} reserved over allocated - 1) x {peak} B - {bill.reserved_above_allocated_bytes} "
        f"B of rounding; {ratio.minimum:.4f} to {ratio.maximum:.4f} in {ratio.count} measurements",
        source="measured on this card by the user",
        grade=Grade.MEASURED,
        in_allocator=False,
        uncertainty_bytes=round(max(ratio.maximum - ratio.median, ratio.median - ratio.minimum) * peak),
        uncertainty="other runs held more, and less",
    )
    return replace(ledger, gpu=replace(resource_ledger(Resource.GPU, (*bill.entries, entry)), grade=bill.grade))
