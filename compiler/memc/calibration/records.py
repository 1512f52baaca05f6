"""What calibration passes on: one measurement with its figures, and what was left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ID_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run, or one set of rates, measured on one kind of card.

    Attributes:
        id: Digest of what was measured; the same measurement has it wherever it is found.
        card: Catalogue key.
        kind: ``verify`` (a lock), ``suite`` (a collection) or ``probe``.
        figures: By name (`memc.facts.measured.FIGURES`).
        conditions: Versions, driver, model and the like, as text or numbers.
    """

    id: str
    card: str
    kind: str
    figures: dict[str, float]
    conditions: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """Returns it as it stands in the file of figures."""
        return {"id": self.id, "kind": self.kind, "figures": self.figures, "conditions": self.conditions}

    @property
    def torch(self) -> str:
        """Release of torch, without a local part; empty when unknown."""
        versions = self.conditions.get("versions")
        return str(versions.get("torch", "")).partition("+")[0] if isinstance(versions, dict) else ""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Something that was found and not used: where it stands, and why not."""

    place: str
    reason: str


def digest_of(document: Mapping[str, Any]) -> str:
    """Returns the id of what was measured."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]
