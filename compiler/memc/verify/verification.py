"""The outcome of a verification: each phase, each rank, all of it, as plain records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from memc.errors import Diagnostic, ExitCode
from memc.verify.accounts import AccountComparison
from memc.verify.attribution import Attribution

MEASURED = "measured"
OVER_MEMORY = ("out-of-memory", "measured-peak-over-budget")
VERIFICATION_SCHEMA = "memc/verification/1"


@dataclass(frozen=True, kw_only=True)
class PhaseComparison:
    """One probed phase beside the ledger.

    Attributes:
        phase: Probed phase.
        allocated_bytes, reserved_bytes: Measured peaks of one rank.
        ledger_bytes: Largest allocated peak of the ledger's phases that happen in it; None when the ledger has none.
        difference_bytes: Measured allocated minus ledger; None with `ledger_bytes`.
    """

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    ledger_bytes: int | None
    difference_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RankVerdict:
    """One rank's peaks beside budget and ledger. Sizes are None when memory was not judged.

    Attributes:
        rank: Its number.
        device_name: As the driver names it.
        phases: In the order of the run.
        peak_allocated_bytes, peak_reserved_bytes: Largest over phases.
        outside_allocator_bytes: What the card held beyond reserved; the ledger's figure when it was not measured.
        required_bytes: Reserved and outside together.
        headroom_bytes: Budget minus required; negative when it does not fit.
        others_bytes: What others held on its card before the run; counted in what lies outside the allocator.
        host_rss_peak_bytes: Largest resident size of the process.
        host_pinned_peak_bytes: Most pinned host memory that torch's allocator held; None when unknown.
        accounts: What it held between steps beside the ledger.
        settled: Whether reserved memory stopped growing; None on a CPU.
        capacity_bytes: Memory that torch sees; None on a CPU.
        ran_out: Whether it stopped for want of memory.
        step_seconds: Median of one optimizer step after the first.
        tokens_per_second: Of this rank.
        first_loss, last_loss: Training loss; None when not a finite number.
    """

    rank: int
    device_name: str
    phases: tuple[PhaseComparison, ...]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    outside_allocator_bytes: int | None
    required_bytes: int | None
    headroom_bytes: int | None
    others_bytes: int
    host_rss_peak_bytes: int | None
    host_pinned_peak_bytes: int | None
    accounts: tuple[AccountComparison, ...]
    settled: bool | None
    capacity_bytes: int | None
    ran_out: bool
    step_seconds: float | None
    tokens_per_second: float | None
    first_loss: float | None
    last_loss: float | None

    @property
    def peak_phase(self) -> str:
        """Probed phase with the largest reserved peak; empty when none was measured."""
        return max(self.phases, key=lambda phase: phase.reserved_bytes).phase if self.phases else ""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The outcome of one verification.

    Attributes:
        device: ``cuda`` or ``cpu``.
        judged: Whether memory was measured on every rank; never on a CPU.
        fits: Whether every rank stayed within the budget; None when not judged.
        within_interval: Whether the measured need lies in the promised interval; None when not judged.
        budget_bytes: What one GPU may use.
        required_bytes: Largest need over ranks; None when not judged.
        headroom_bytes: Budget minus required; None when not judged.
        ledger_required_bytes: What the lock promised.
        uncertainty_bytes: Half the width of the promised interval.
        difference_bytes: Measured minus promised; None when not judged.
        step_seconds: Of the slowest rank; None without steps.
        clock_step_seconds: What the lock promised; None without a clock.
        step_time_matches: Whether the two differ by at most 15 %; None on a CPU or without either.
        steps: Optimizer steps asked for.
        world_size: Number of processes.
        random_weights: Whether the run built the model without its trained weights.
        driver: Version of the GPU driver; empty when unknown.
        versions: Library → version, of rank 0.
        ranks: By rank.
        seconds: Wall clock of the whole run.
        diagnostics: What is wrong; empty when the verification passed.
        log_tail: Last lines the launcher printed; empty when it passed.
        grade: ``measured`` on a card, ``rehearsed`` on one that does not exist.
        run_seconds: The whole run at the measured pace; None when it was not timed on a card, or its steps are unknown.
        budget_seconds: Longest allowed run; None without a limit.
        time_holds: Whether the run stays within it; None without either.
        host_resident_bytes: Peaks of all processes of this node, pages that they share counted in each; None when
            unknown.
        host_ledger_bytes: What the ledger books on the host of one node; None when it says nothing.
        conditions: What about the machine bears on the measurement, as the lock keeps it.
        files_digest: Of the files that ran.
        notes: What a reader must know of the machine, as sentences.
        attributions: Rank → what its memory was for; of ranks that left a snapshot.
        ranks_in_lock: Ranks that the lock's measurement holds by now, those of other nodes included; 0 when none was
            kept.
        total_steps: Optimizer steps of the whole run; None when the amount of data is unknown.
    """

    device: str
    judged: bool
    fits: bool | None
    within_interval: bool | None
    budget_bytes: int
    required_bytes: int | None
    headroom_bytes: int | None
    ledger_required_bytes: int
    uncertainty_bytes: int
    difference_bytes: int | None
    step_seconds: float | None
    clock_step_seconds: float | None
    step_time_matches: bool | None
    steps: int
    world_size: int
    random_weights: bool
    driver: str
    versions: dict[str, str]
    ranks: tuple[RankVerdict, ...]
    seconds: float
    diagnostics: tuple[Diagnostic, ...]
    log_tail: tuple[str, ...]
    grade: str = MEASURED
    run_seconds: float | None = None
    budget_seconds: float | None = None
    time_holds: bool | None = None
    host_resident_bytes: int | None = None
    host_ledger_bytes: int | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    files_digest: str = ""
    notes: tuple[str, ...] = ()
    attributions: dict[int, Attribution] = field(default_factory=dict)
    ranks_in_lock: int = 0
    total_steps: int | None = None

    @property
    def over_memory(self) -> bool:
        """Whether what is wrong is that the card has too little memory for the plan, and nothing else."""
        return bool(self.diagnostics) and all(finding.code in OVER_MEMORY for finding in self.diagnostics)

    @property
    def passed(self) -> bool:
        """Whether the run was sound and, where memory was judged, fits."""
        return not self.diagnostics

    @property
    def exit_code(self) -> ExitCode:
        """What `memc verify` exits with."""
        return ExitCode.OK if self.passed else ExitCode.VERIFICATION_FAILED

    def document(self) -> dict[str, Any]:
        """Returns the outcome for ``--json``: plain dicts, lists, numbers and text."""
        diagnostics = [
            {
                "code": finding.code,
                "message": finding.message,
                "where": str(finding.where or ""),
                "context": list(finding.context),
                "hint": finding.hint,
            }
            for finding in self.diagnostics
        ]
        own = asdict(self) | {"diagnostics": diagnostics, "exit_code": int(self.exit_code), "passed": self.passed}
        return {"schema": VERIFICATION_SCHEMA, **own}

    def measurement(self) -> dict[str, Any]:
        """Returns what the lock keeps: peaks and step time with their conditions; no date, host name or path."""
        ranks = [
            {
                "rank": rank.rank,
                "device_name": rank.device_name,
                "phases": {
                    phase.phase: {"allocated_bytes": phase.allocated_bytes, "reserved_bytes": phase.reserved_bytes}
                    for phase in rank.phases
                },
                "peak_allocated_bytes": rank.peak_allocated_bytes,
                "peak_reserved_bytes": rank.peak_reserved_bytes,
                "required_bytes": rank.required_bytes,
                "outside_allocator_bytes": rank.outside_allocator_bytes,
                "others_bytes": rank.others_bytes,
                "host_rss_peak_bytes": rank.host_rss_peak_bytes,
                "host_pinned_peak_bytes": rank.host_pinned_peak_bytes,
                "held_bytes": {f"{one.account} on {one.place}": one.held_bytes for one in rank.accounts},
                "settled": rank.settled,
                "tokens_per_second": None if rank.tokens_per_second is None else round(rank.tokens_per_second, 1),
            }
            for rank in self.ranks
        ]
        return {
            "grade": self.grade,
            "judged": self.judged,
            "fits": self.fits,
            "device": self.device,
            "driver": self.driver,
            "versions": dict(sorted(self.versions.items())),
            "steps": self.steps,
            "world_size": self.world_size,
            "random_weights": self.random_weights,
            "budget_bytes": self.budget_bytes,
            "required_bytes": self.required_bytes,
            "step_seconds": None if self.step_seconds is None else round(self.step_seconds, 4),
            "run_seconds": None if self.run_seconds is None else round(self.run_seconds, 1),
            "conditions": self.conditions,
            "files_digest": self.files_digest,
            "ranks": ranks,
        }
