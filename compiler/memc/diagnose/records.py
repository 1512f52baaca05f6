"""What a diagnosis says: findings with account, phase, cause, the lines they rest on, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from memc.ledger.entries import Account, Phase, Resource

SCHEMA = "memc/diagnose/1"


class Cause(StrEnum):
    """The likely cause."""

    OTHER_PROCESS = "another process on the card"
    FRAGMENTATION = "fragmentation of the caching allocator"
    ALLOCATOR_LIMIT = "a limit set on the allocator"
    STATIC = "weights and states do not fit"
    FIRST_STEP = "optimizer states, first allocated in the first step"
    MASTERS = "fp32 masters and states, allocated when the engine starts"
    GATHER = "whole weights gathered for saving"
    LOGITS = "logits of the whole batch"
    LONG_SAMPLE = "one long sample or one very large tensor"
    ACTIVATIONS = "activations of the batch"
    GROWTH = "memory that grows from step to step"
    BACKWARD = "gradients on top of the kept activations"
    BUCKETS = "communication buffers"
    EVALUATION = "evaluation keeps logits, or has too large a batch"
    LIBRARY = "no room left for a CUDA library"
    CONTEXT = "no room for the CUDA context"
    KV_CACHE = "the key/value cache of generation"
    HOST = "host memory"
    SHARED_MEMORY = "shared memory of the data loader"
    OVER_OPTIMISED = "more techniques than the card needs"
    IN_USE = "memory in use; no failure seen"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One line that a finding rests on; `line` is 1-based, 0 when the input has no lines."""

    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was recognised.

    Attributes:
        kind: What was read, kebab-case, for example ``torch-out-of-memory``.
        cause: The likely cause.
        account: The account that overflowed; None when the input does not tell.
        phase: What the run was doing; None when the input does not tell.
        resource: Where memory was short.
        sentence: What happened, with the numbers.
        evidence: The lines it rests on.
        figures: Sizes in bytes by name, as the input gives them.
        remedies: What to do, cheapest first.
        seen: How many times the same thing was found (ranks).
    """

    kind: str
    cause: Cause
    account: Account | None
    phase: Phase | None
    resource: Resource
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    figures: dict[str, int] = field(default_factory=dict)
    remedies: tuple[str, ...] = ()
    seen: int = 1

    def document(self) -> dict[str, Any]:
        """Returns the finding JSON-ready."""
        return {
            "kind": self.kind,
            "cause": self.cause.value,
            "account": None if self.account is None else self.account.value,
            "phase": None if self.phase is None else self.phase.value,
            "resource": self.resource.value,
            "sentence": self.sentence,
            "evidence": [{"line": item.line, "text": item.text} for item in self.evidence],
            "figures_bytes": dict(sorted(self.figures.items())),
            "remedies": list(self.remedies),
            "seen": self.seen,
        }
