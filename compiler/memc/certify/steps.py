"""Traced steps as records: from the tracing process, and from a lock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memc.ledger.entries import Account, Phase
from memc.ledger.traced import STEP_PHASES, TracedPhase, TracedReserved, TracedStack, TracedStep


def step_of(document: Mapping[str, Any]) -> TracedStep:
    """Returns the record that a document holds.

    Raises:
        KeyError, TypeError, ValueError: When it is no such document.
    """
    return TracedStep(
        digest=str(document["digest"]),
        tracer=str(document["tracer"]),
        versions={str(name): str(version) for name, version in sorted(document["versions"].items())},
        phases=tuple(_phase(item) for item in document["phases"] if Phase(item["phase"]) in STEP_PHASES),
        reserved=TracedReserved(
            **{name: _bytes(document["reserved"][name]) for name in ("expected_bytes", "low_bytes", "high_bytes")}
        ),
        stacks=tuple(
            TracedStack(name=item["name"], layers=item["layers"], traced_layers=item["traced_layers"])
            for item in document["stacks"]
        ),
        assumes=tuple(document["assumes"]),
        not_modelled=tuple(document["not_modelled"]),
    )


def _phase(item: Mapping[str, Any]) -> TracedPhase:
    sizes = {Account(name): _bytes(size) for name, size in item["by_account"].items()}
    return TracedPhase(phase=Phase(item["phase"]), allocated_bytes=_bytes(item["allocated_bytes"]), by_account=sizes)


def _bytes(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no number of bytes")
    return value
