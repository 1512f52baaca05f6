"""What a file of records shows: coverage, errors weighed by group, verdicts, and the misses with their reasons."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from published.judging import Outcome
from published.readings import read_metric
from published.records import Skip


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Absolute relative errors of a set of comparisons.

    Attributes:
        count: Comparisons.
        models: Different models.
        median, p90, worst: Fractions; 0 without comparisons.
    """

    count: int
    models: int
    median: float
    p90: float
    worst: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The whole file.

    Attributes:
        eligible: Measured records of high confidence whose metric is known.
        errors: Errors of the eligible ones that were compared, every group weighing the same.
        plain: The same with every record weighing the same.
        others: Errors of compared records of lower confidence, every group weighing the same.
        verdicts: Verdicts priced, of high confidence.
        right: Those that agree.
        oom_as_fit: ``oom`` records that the ledger calls a fit with headroom: names.
    """

    eligible: int
    errors: Errors
    plain: Errors
    others: Errors
    verdicts: int
    right: int
    oom_as_fit: tuple[str, ...]

    @property
    def coverage(self) -> float:
        """Compared over eligible; 0 when nothing is eligible."""
        return self.errors.count / self.eligible if self.eligible else 0.0


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """Returns what the outcomes of a file show."""
    eligible = [item for item in outcomes if is_eligible(item)]
    compared = [item for item in eligible if item.error is not None]
    others = [item for item in outcomes if item.error is not None and not is_eligible(item)]
    verdicts = [item for item in outcomes if item.right is not None and item.record.text("confidence") == "high"]
    return Summary(
        eligible=len(eligible),
        errors=_errors(compared, by_group=True),
        plain=_errors(compared, by_group=False),
        others=_errors(others, by_group=True),
        verdicts=len(verdicts),
        right=sum(bool(item.right) for item in verdicts),
        oom_as_fit=tuple(item.record.id for item in verdicts if item.record.kind == "oom" and not item.right),
    )


def is_eligible(item: Outcome) -> bool:
    """Returns whether a record counts for coverage: measured, of high confidence, with a known metric."""
    if item.record.kind != "measured" or item.record.text("confidence") != "high":
        return False
    try:
        read_metric(item.record)
    except Skip:
        return False
    return True


def _errors(items: Sequence[Outcome], *, by_group: bool) -> Errors:
    sizes = Counter(item.record.group for item in items)
    pairs = sorted((abs(item.error or 0.0), 1 / sizes[item.record.group] if by_group else 1.0) for item in items)
    models = {item.pinned.model.key for item in items if item.pinned is not None}
    return Errors(
        count=len(items),
        models=len(models),
        median=weighted_quantile(pairs, 0.5),
        p90=weighted_quantile(pairs, 0.9),
        worst=pairs[-1][0] if pairs else 0.0,
    )


def weighted_quantile(pairs: Sequence[tuple[float, float]], share: float) -> float:
    """Returns the smallest value that at least `share` of the weight does not exceed; 0 without values.

    Args:
        pairs: Values with their weights, in ascending order of value.
        share: Between 0 and 1.
    """
    total, reached = sum(weight for _, weight in pairs), 0.0
    for value, weight in pairs:
        reached += weight
        if reached >= share * total - 1e-12:
            return value
    return 0.0


def skipped_reasons(outcomes: Iterable[Outcome]) -> list[tuple[str, int, int]]:
    """Returns reasons with how many eligible records and how many in all they leave out, most frequent first."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for item in outcomes:
        if item.skipped:
            counts[item.skipped][0] += is_eligible(item)
            counts[item.skipped][1] += 1
    return sorted(((reason, own, total) for reason, (own, total) in counts.items()), key=lambda row: (-row[1], -row[2]))


def by_group(outcomes: Iterable[Outcome]) -> list[tuple[str, Errors, float]]:
    """Returns for each group its errors and the median signed error, largest group first."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for item in outcomes:
        if item.error is not None:
            groups[item.record.group].append(item)
    rows = []
    for name, items in groups.items():
        signed = sorted(item.error or 0.0 for item in items)
        rows.append((name, _errors(items, by_group=False), signed[len(signed) // 2]))
    return sorted(rows, key=lambda row: -row[1].count)
