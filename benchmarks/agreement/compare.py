"""How far the ledger is from what was traced, and tables of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from differences import Summary, summary_of
from memc.facts import load_gpu
from memc.facts.records import ModelFacts
from memc.ledger import Estimator, Moment, ledger_facts

from agreement.cases import Mode, Shape, facts_of, training_config, why_not

GPU = "h100-sxm5-80gb"
"""The card whose kernels the trace takes when none is named."""
_NOT_IN_TRACE = "cublas"
_STEP = [moment for moment in Moment if moment.value.startswith(("forward", "loss", "backward", "step"))]


@dataclass(frozen=True)
class Comparison:
    """One case in which both sides have a figure.

    Attributes:
        shape: The model, and those like it.
        mode: How it is trained.
        traced_bytes, ledger_bytes: Allocated peaks of the step without cuBLAS workspaces.
        moment: Where the ledger peaks.
    """

    shape: Shape
    mode: Mode
    traced_bytes: int
    ledger_bytes: int
    moment: str

    @property
    def difference(self) -> float:
        """Ledger over trace, less one."""
        return self.ledger_bytes / self.traced_bytes - 1


@dataclass(frozen=True)
class Skipped:
    """One case without a comparison, and why."""

    shape: Shape
    mode: Mode
    reason: str


def compare(
    cases: Iterable[tuple[Shape, Mode]], peaks: Mapping[tuple[str, str], int], errors: Mapping[tuple[str, str], str]
) -> tuple[list[Comparison], list[Skipped]]:
    """Returns comparisons and what could not be compared.

    Args:
        cases: Which.
        peaks: Traced peaks by model and mode.
        errors: Why the others have none, where that is known.
    """
    found, skipped = [], []
    for shape, mode in cases:
        key = (shape.key, str(mode))
        reason = why_not(shape, mode) or facts_of(shape.key).unpriced
        reason = reason or ("" if key in peaks else errors.get(key, "not traced yet"))
        try:
            priced = None if reason else step_peak(shape.key, mode)
        except Exception as error:  # whatever stops the closed forms on some model is reported, and stops no other
            priced, reason = None, f"ledger: {type(error).__name__}: {' '.join(str(error).split())}"[:120]
        if priced is None:
            skipped.append(Skipped(shape, mode, reason))
        else:
            moment, ledger_bytes = priced
            found.append(Comparison(shape, mode, peaks[key], ledger_bytes, moment.value))
    return found, skipped


def step_peak(key: str, mode: Mode) -> tuple[Moment, int]:
    """Returns where in the step the ledger of a case peaks, and its allocated bytes without cuBLAS workspaces."""
    by_moment = step_moments(key, mode)
    moment = max(by_moment, key=lambda item: by_moment[item])
    return moment, by_moment[moment]


def step_moments(key: str, mode: Mode) -> dict[Moment, int]:
    """Returns the ledger's allocated bytes at the moments of a step, cuBLAS workspaces left out."""
    model = facts_of(key)
    ledger = _estimator(model).ledger(training_config(model, mode)).gpu
    outside = [entry for entry in ledger.entries if entry.in_allocator and _NOT_IN_TRACE in entry.name]
    return {
        moment: ledger.by_moment[moment] - sum(entry.bytes for entry in outside if moment in entry.moments)
        for moment in _STEP
    }


@cache
def _estimator(model: ModelFacts) -> Estimator:
    return Estimator(model, ledger_facts(load_gpu(GPU)))


def summary(comparisons: Sequence[Comparison]) -> Summary:
    """Returns the statistics of at least one comparison."""
    found = summary_of(item.difference for item in comparisons)
    if found is None:
        raise ValueError("there is nothing to compare")
    return found


def summaries(comparisons: Iterable[Comparison], kind: Callable[[Comparison], str]) -> dict[str, Summary]:
    """Returns the statistics of each kind of comparison, in order of the kind's name."""
    groups: dict[str, list[Comparison]] = {}
    for item in comparisons:
        groups.setdefault(kind(item), []).append(item)
    return {name: summary(groups[name]) for name in sorted(groups)}
