"""A pinned record priced by the ledger and held against what was published."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from memc.errors import MemcError
from memc.ledger import Estimator, Ledger, ledger_facts
from memc.ledger.constants import LedgerFacts
from memc.ledger.parts import TRAINING

from published.pinning import Pinned, pin
from published.readings import Metric, read_metric
from published.records import Record, Skip

_COMPARED = ("measured",)
_VERDICTS = ("oom", "fits")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One record after comparison.

    Attributes:
        record: The record.
        skipped: Why it was not compared; empty when it was.
        metric: What the figure counts; None without a comparison.
        published_bytes: The published figure; None for a verdict.
        priced_bytes: The ledger's figure in the same metric; None when it was not priced.
        capacity_bytes: What the card has; set for a verdict.
        ledger: The bill; None when it was not priced.
        pinned: The configuration; None when it was not read.
    """

    record: Record
    skipped: str = ""
    metric: Metric | None = None
    published_bytes: int | None = None
    priced_bytes: int | None = None
    capacity_bytes: int | None = None
    ledger: Ledger | None = None
    pinned: Pinned | None = None

    @property
    def error(self) -> float | None:
        """Signed relative error, priced / published - 1; None without two figures."""
        if self.published_bytes is None or self.priced_bytes is None:
            return None
        return self.priced_bytes / self.published_bytes - 1

    @property
    def right(self) -> bool | None:
        """Whether the verdict agrees; None when the record holds a figure or was not priced.

        ``fits`` is an upper bound: the run needs no more than the card has. ``oom`` is a lower bound.
        """
        if self.capacity_bytes is None or self.priced_bytes is None:
            return None
        fits = self.priced_bytes <= self.capacity_bytes
        return fits if self.record.kind == "fits" else not fits


class Judge:
    """Prices records, with one estimator for each model and stack."""

    def __init__(self) -> None:
        self._estimators: dict[tuple[str, str, LedgerFacts], Estimator] = {}

    def judge(self, record: Record) -> Outcome:
        """Returns the comparison of one record, or why there is none. Never raises for what a record holds."""
        try:
            if record.kind in _COMPARED:
                return self._figure(record)
            if record.kind in _VERDICTS:
                return self._verdict(record)
        except Skip as reason:
            return Outcome(record=record, skipped=str(reason))
        except MemcError as error:
            return Outcome(record=record, skipped=error.diagnostics[0].message)
        return Outcome(record=record, skipped=f"no measurement: {record.kind or 'kind not said'}")

    def _figure(self, record: Record) -> Outcome:
        metric, published = read_metric(record), record.measured_bytes
        if published is None:
            raise Skip("the record holds no figure")
        pinned = pin(record)
        ledger = self.price(pinned)
        return Outcome(
            record=record,
            metric=metric,
            published_bytes=published,
            priced_bytes=counted(ledger, metric),
            ledger=ledger,
            pinned=pinned,
        )

    def _verdict(self, record: Record) -> Outcome:
        pinned = pin(record)
        ledger = self.price(pinned)
        nominal = record.capacity_bytes
        capacity = pinned.gpu.capacity_bytes or nominal
        if nominal is not None and capacity is not None and not 0.85 < capacity / nominal < 1.05:
            capacity = nominal  # the card of that name in another size
        if capacity is None:
            raise Skip("the card's size is not known")
        return Outcome(
            record=record, priced_bytes=counted(ledger, Metric.DEVICE), capacity_bytes=capacity, ledger=ledger, pinned=pinned
        )

    def price(self, pinned: Pinned) -> Ledger:
        """Returns the bill of a pinned configuration."""
        facts = replace(ledger_facts(pinned.gpu), stack=pinned.software.stack)
        key = (pinned.model.key, pinned.model.model_type, facts)
        if key not in self._estimators:
            self._estimators[key] = Estimator(pinned.model, facts)
        return self._estimators[key].ledger(pinned.config)


def counted(ledger: Ledger, metric: Metric) -> int:
    """Returns the bytes that a metric counts of the training step.

    Loading is left out: every program loads in its own way, and most counters are reset after it.
    """
    gpu = ledger.gpu
    allocated = max(gpu.by_moment[moment] for moment in TRAINING)
    if metric is Metric.ALLOCATED:
        return allocated
    reserved = allocated + gpu.reserved_above_allocated_bytes
    return reserved if metric is Metric.RESERVED else reserved + gpu.outside_allocator_bytes


def judge_all(records: Iterable[Record]) -> list[Outcome]:
    """Returns the comparison of every record, in order."""
    judge = Judge()
    return [judge.judge(record) for record in records]
