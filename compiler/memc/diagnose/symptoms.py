"""Symptoms by name: what a person sees, and what it usually means."""

from __future__ import annotations

from dataclasses import dataclass

from memc.diagnose.records import Cause, Finding
from memc.diagnose.remedies import remedies
from memc.errors import usage_error
from memc.ledger.entries import Account, Phase, Resource
from memc.spec_errors import nearest


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """One row of the sheet: what is seen, and account, phase and cause behind it."""

    seen: str
    meaning: str
    cause: Cause
    account: Account | None
    phase: Phase | None


SYMPTOMS: dict[str, Symptom] = {
    "start": Symptom(
        seen="out of memory when training starts",
        meaning="what never changes (weights, gradients, optimizer states) does not fit: a static wall",
        cause=Cause.STATIC,
        account=Account.PARAMETERS,
        phase=Phase.LOAD,
    ),
    "growing": Symptom(
        seen="out of memory after a while; usage climbs",
        meaning="activations of longer batches, tensors kept over steps, or fragmentation: a dynamic wall",
        cause=Cause.GROWTH,
        account=Account.ACTIVATIONS,
        phase=Phase.BACKWARD,
    ),
    "long-sample": Symptom(
        seen="one long sample runs out of memory",
        meaning="activations grow with the longest sequence of the batch",
        cause=Cause.LONG_SAMPLE,
        account=Account.ACTIVATIONS,
        phase=Phase.FORWARD,
    ),
    "slow": Symptom(
        seen="it fits, but is very slow",
        meaning="memory is bought with time that need not be spent, or data loading is the bottleneck",
        cause=Cause.OVER_OPTIMISED,
        account=None,
        phase=None,
    ),
    "inference": Symptom(
        seen="out of memory while generating",
        meaning="the key/value cache grows with context and requests; neither gradients nor optimizer play a part",
        cause=Cause.KV_CACHE,
        account=Account.WORKSPACE,
        phase=Phase.EVALUATE,
    ),
}


def symptom_finding(name: str) -> Finding:
    """Returns what the symptom called `name` means.

    Raises:
        MemcError: ``symptom-unknown`` with the nearest name.
    """
    symptom = SYMPTOMS.get(name)
    if symptom is None:
        near = nearest(name, SYMPTOMS)
        guess = f"; did you mean {near}?" if near else ""
        raise usage_error(
            "symptom-unknown",
            f"no symptom is called {name!r}{guess}",
            hint=f"use one of {', '.join(SYMPTOMS)}, or list",
        )
    return Finding(
        kind="symptom",
        cause=symptom.cause,
        account=symptom.account,
        phase=symptom.phase,
        resource=Resource.GPU,
        sentence=f"{symptom.seen}: {symptom.meaning}",
        remedies=remedies(symptom.cause),
    )
