"""Room that a measurement asks for: what a card needed beyond the ledger is kept free when the spec is solved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memc.plan import Infeasible, Plan

Solver = Callable[[int], Plan | Infeasible]
"""Solves the spec with so many bytes of the GPU's budget kept free."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What is kept free, and why.

    Attributes:
        bytes: Of each GPU's budget.
        reason: A sentence with the measurement that asks for it.
        spec_digest: The spec that was measured; of another one the measurement says nothing.
    """

    bytes: int
    reason: str
    spec_digest: str

    def document(self) -> dict[str, Any]:
        """Returns what the lock keeps."""
        return {"bytes": self.bytes, "reason": self.reason, "spec": self.spec_digest}


def room_of(document: Any, spec_digest: str) -> Room | None:
    """Returns the room that a lock keeps for a spec; None when it keeps none, or for another spec."""
    if not isinstance(document, dict) or document.get("spec") != spec_digest:
        return None
    size, reason = document.get("bytes"), document.get("reason")
    if not isinstance(size, int) or size <= 0 or not isinstance(reason, str):
        return None
    return Room(bytes=size, reason=reason, spec_digest=spec_digest)


def with_room(solve: Solver, room: Room) -> Solver:
    """Returns a solver that keeps the room free; its plans show the spec's whole budget and say why they leave some."""

    def solved(margin_bytes: int) -> Plan | Infeasible:
        result = solve(margin_bytes + room.bytes)
        if isinstance(result, Infeasible):
            return replace(result, causes=(room.reason, *result.causes))
        budget = replace(result.budget, gpu_bytes=result.budget.gpu_bytes + room.bytes)
        return replace(result, budget=budget, warnings=(room.reason, *result.warnings))

    return solved
