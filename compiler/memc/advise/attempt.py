"""One variation of a spec that was tried: its plan in short, or what stopped it and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memc.config import TrainingConfig
from memc.solver.frames import Totals
from memc.solver.search import Machine
from memc.solver.timed import Timed
from memc.units import format_gib, format_seconds


class Stopper(StrEnum):
    """What stops a variation."""

    GPU = "gpu"
    HOST = "host"
    NVME = "nvme"
    TIME = "time"
    MODEL = "model"
    BATCH = "batch"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """Why a variation has no plan.

    Attributes:
        stopped_by: What stops it.
        bytes: How far the nearest configuration is above the budget; 0 unless memory stops it.
        seconds: How far the fastest plan is above a budget of time; 0 unless that stops it.
        sentence: The same for a person.
    """

    stopped_by: Stopper
    bytes: int = 0
    seconds: float = 0.0
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A plan in short.

    Attributes:
        config: The configuration.
        rung: Highest rung it uses.
        techniques: Names, in order of application.
        required_bytes: What each GPU must have.
        budget_bytes: What of each GPU may be used.
        host_bytes: What the memory of one node must hold.
        step_seconds: One optimizer step; None when the card's speed is unknown.
        total_seconds: The run; None when that or the amount of data is unknown.
        total_usd: The run; None when its length or the price is unknown.
    """

    config: TrainingConfig
    rung: int
    techniques: tuple[str, ...]
    required_bytes: int
    budget_bytes: int
    host_bytes: int
    step_seconds: float | None
    total_seconds: float | None
    total_usd: float | None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A variation that was priced.

    Attributes:
        machine: Its question.
        best: The choice; None when nothing fits.
    """

    machine: Machine
    best: Timed | None

    def summary(self) -> Summary | None:
        """Returns the plan in short; None when nothing fits."""
        if self.best is None:
            return None
        candidate, time = self.best.candidate, self.best.time
        return Summary(
            config=candidate.config,
            rung=candidate.rung,
            techniques=tuple(technique.name for technique in candidate.techniques),
            required_bytes=candidate.price.gpu_required_bytes,
            budget_bytes=self.machine.question.budget.gpu_bytes,
            host_bytes=candidate.needs.host,
            step_seconds=time.known_step_seconds,
            total_seconds=time.total_seconds,
            total_usd=time.total_usd,
        )

    def shortfall(self) -> Shortfall | None:
        """Returns what stops the nearest configuration; None when one fits."""
        if self.best is not None:
            return None
        if not self.machine.space().considered:
            return Shortfall(
                stopped_by=Stopper.REFUSED, sentence="the techniques that the spec requires exclude each other"
            )
        nearest = self.machine.space().least_memory()
        assert nearest is not None
        needs = nearest[0].totals(nearest[1])
        return self._too_slow() if needs.within(self.machine.question.budget) else self._too_large(needs)

    def _too_slow(self) -> Shortfall:
        budget = self.machine.question.budget
        fitting = self.machine.space().fitting()
        times = [self.machine.time(frame.with_shape(shape)) for frame, shape in fitting]
        if budget.usd is not None:
            least = min(time.total_usd or 0.0 for time in times)
            sentence = f"the cheapest plan that fits costs ${least:,.2f}; the budget is ${budget.usd:,.2f}"
            return Shortfall(stopped_by=Stopper.TIME, sentence=sentence)
        seconds, limit = min(time.total_seconds or 0.0 for time in times), budget.seconds or 0.0
        sentence = f"the fastest plan that fits takes {format_seconds(seconds)}; the budget is {format_seconds(limit)}"
        return Shortfall(stopped_by=Stopper.TIME, seconds=seconds - limit, sentence=sentence)

    def _too_large(self, needs: Totals) -> Shortfall:
        budget = self.machine.question.budget
        over = needs.gpu - budget.gpu_bytes
        if over > 0:
            sentence = f"{format_gib(over)} short on each GPU ({format_gib(needs.gpu)} at best)"
            return Shortfall(stopped_by=Stopper.GPU, bytes=over, sentence=sentence)
        over = needs.host - (needs.host if budget.host_bytes is None else budget.host_bytes)
        if over > 0:
            sentence = f"{format_gib(over)} short on the host ({format_gib(needs.host)} at best)"
            return Shortfall(stopped_by=Stopper.HOST, bytes=over, sentence=sentence)
        over = needs.nvme - budget.nvme_bytes
        sentence = f"{format_gib(over)} short on the drive ({format_gib(needs.nvme)} at best)"
        return Shortfall(stopped_by=Stopper.NVME, bytes=over, sentence=sentence)
