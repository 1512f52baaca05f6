"""A pinned record priced by the ledger and held against what was published."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from memc.errors import MemcError
from memc.ledger import Estimator, Ledger, ledger_facts
from memc.ledger.constants import LedgerFacts
from memc.ledger.entries import Moment
from memc.ledger.parts import TRAINING
from memc.ledger.program import ProgramError
from memc.units import GIB

from published.alone import is_operation, operation_bytes
from published.pinning import Pinned, pin
from published.readings import Metric, read_metric
from published.records import Record, Skip
from published.reserved import reserved_above_allocated

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
        self._estimators: dict[tuple[str, tuple[str, ...], LedgerFacts], Estimator] = {}

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
        except (ArithmeticError, LookupError, TypeError, ValueError, ProgramError) as error:
            return Outcome(record=record, skipped=f"the record cannot be priced: {type(error).__name__}: {error}"[:120])
        return Outcome(record=record, skipped=f"no measurement: {record.kind or 'kind not said'}")

    def _figure(self, record: Record) -> Outcome:
        metric, published = _best_metric(record)
        if is_operation(record):
            return Outcome(
                record=record, metric=metric, published_bytes=published, priced_bytes=operation_bytes(record)
            )
        pinned = pin(record)
        ledger = self.price(pinned)
        return Outcome(
            record=record,
            metric=metric,
            published_bytes=published,
            priced_bytes=self.counted(record, ledger, pinned, metric),
            ledger=ledger,
            pinned=pinned,
        )

    def _verdict(self, record: Record) -> Outcome:
        pinned = pin(record)
        ledger = self.price(pinned)
        return Outcome(
            record=record,
            priced_bytes=self.counted(record, ledger, pinned, Metric.DEVICE),
            capacity_bytes=_capacity(record, pinned),
            ledger=ledger,
            pinned=pinned,
        )

    def counted(self, record: Record, ledger: Ledger, pinned: Pinned, metric: Metric) -> int:
        """Returns the bytes that a metric counts.

        Loading is left out unless the counter was not reset after it: every program loads in its own way. What the
        allocator holds above what lies in it comes from a replay of the step.
        """
        gpu = ledger.gpu
        step = max(gpu.by_moment[moment] for moment in TRAINING)
        allocated = max(step, gpu.by_moment[Moment.LOAD]) if pinned.software.counts_loading else step
        if metric is Metric.ALLOCATED:
            return allocated
        reserved = allocated
        if not pinned.config.expandable_segments:
            capacity = capacity_bytes(record, pinned)
            room = None if capacity is None else capacity - gpu.outside_allocator_bytes
            above = reserved_above_allocated(pinned.model, pinned.config, self.facts(pinned), room)
            reserved = max(allocated, step + above)
        return reserved if metric is Metric.RESERVED else reserved + gpu.outside_allocator_bytes

    def price(self, pinned: Pinned) -> Ledger:
        """Returns the bill of a pinned configuration."""
        facts = self.facts(pinned)
        programs = tuple(group.block.forward for group in pinned.model.groups)
        key = (pinned.model.key, programs, facts)
        if key not in self._estimators:
            self._estimators[key] = Estimator(pinned.model, facts)
        return self._estimators[key].ledger(pinned.config)

    @staticmethod
    def facts(pinned: Pinned) -> LedgerFacts:
        """Returns the library facts of what a record ran."""
        facts = replace(ledger_facts(pinned.gpu), stack=pinned.software.stack)
        context = pinned.software.context_bytes
        return facts if context is None else replace(facts, context_bytes=context)


def _best_metric(record: Record) -> tuple[Metric, int]:
    """Returns what is compared: the allocated bytes where a record has them too, else its figure.

    Raises:
        Skip: When the record's metric is not known or it holds no figure.
    """
    metric, published = read_metric(record), record.measured_bytes
    if published is None:
        raise Skip("the record holds no figure")
    others = record.mapping("other_metrics")
    for name in ("peak_allocated_gib", "peak_active_gib"):
        value = others.get(name)
        if metric is not Metric.ALLOCATED and isinstance(value, int | float) and value > 0:
            return Metric.ALLOCATED, int(value * GIB)
    return metric, published


def capacity_bytes(record: Record, pinned: Pinned) -> int | None:
    """Returns what the card of a record has: the catalogue's figure, or the record's for that name in another size."""
    nominal, capacity = record.capacity_bytes, pinned.gpu.capacity_bytes
    if nominal is not None and (capacity is None or not 0.85 < capacity / nominal < 1.05):
        return nominal
    return capacity


def _capacity(record: Record, pinned: Pinned) -> int:
    """Returns what the card of a record has.

    Raises:
        Skip: When neither the catalogue nor the record says it.
    """
    capacity = capacity_bytes(record, pinned)
    if capacity is None:
        raise Skip("the card's size is not known")
    return capacity


def judge_all(records: Iterable[Record]) -> list[Outcome]:
    """Returns the comparison of every record, in order."""
    judge = Judge()
    return [judge.judge(record) for record in records]
