"""Plan: the decided record. Everything that decides writes one; everything that prints reads one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memc.clock.steptime import StepTime
from memc.config import TrainingConfig
from memc.facts.records import GpuFacts, ModelFacts
from memc.ledger.entries import Ledger, Resource
from memc.ledger.traced import Comparison, TracedStep


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """The loss of preference training.

    Attributes:
        beta: How strongly the model is held to its reference.
        loss: Name of the loss, as TRL's `loss_type`.
        label_smoothing: Share of pairs that are taken to be the wrong way round.
    """

    beta: float
    loss: str
    label_smoothing: float


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What the emitted script needs beyond the configuration: paths, hyper-parameters, cadence.

    Attributes:
        model: What `from_pretrained` is given: a hub id or a path, verbatim from the spec.
        train_data: Path of the training file (JSONL, JSON or Parquet), verbatim; relative paths are relative to the
            folder that the launcher is started from.
        eval_data: Path of the evaluation file; empty without one.
        epochs: Passes over the data; may be fractional.
        max_steps: Optimizer steps; 0 when `epochs` decides.
        learning_rate, weight_decay, warmup_ratio, max_grad_norm, lr_scheduler, seed: As in TrainingArguments.
        save_steps, eval_steps, logging_steps: Optimizer steps between; 0 switches saving or evaluation off.
        save_total_limit: Checkpoints kept.
        output_dir: Where checkpoints go, relative to the folder the launcher is started from.
        assistant_only_loss: Whether only assistant turns carry loss (chat data).
        trust_remote_code: Whether model code from the hub may run.
        nvme_path: Folder on the NVMe drive of every node, for what is offloaded there.
        scheduler: What starts the run on its machines: ``none``, ``slurm``, ``skypilot`` or ``kubernetes``.
        time_limit_hours: Hours after which the scheduler may end the run; 0 leaves it to the scheduler.
        partition, account: Slurm's; empty for its defaults.
        image: Container image; empty without one.
        volume: Kubernetes claim of the volume that holds the data; empty without one.
        accelerator: What SkyPilot calls the card; empty without.
        libraries: Package and release where the spec names one; the others are those that memc plans with.
        dpo: The loss of preference training; None for other tasks.
        new_tokens: Tokens that are added to the vocabulary before training.
        labels: Names of the classes that texts are sorted into; empty where they are found in the training file.
    """

    model: str
    train_data: str
    eval_data: str
    epochs: float
    max_steps: int
    learning_rate: float
    weight_decay: float
    warmup_ratio: float
    max_grad_norm: float
    lr_scheduler: str
    seed: int
    save_steps: int
    eval_steps: int
    logging_steps: int
    save_total_limit: int
    output_dir: str
    assistant_only_loss: bool
    trust_remote_code: bool
    nvme_path: str = "/local_nvme"
    scheduler: str = "none"
    time_limit_hours: int = 0
    partition: str = ""
    account: str = ""
    image: str = ""
    volume: str = ""
    accelerator: str = ""
    libraries: tuple[tuple[str, str], ...] = ()
    dpo: PreferenceSettings | None = None
    labels: tuple[str, ...] = ()
    new_tokens: tuple[str, ...] = ()


class Verdict(StrEnum):
    """What became of a configuration that was looked at."""

    CHOSEN = "chosen"
    TOO_LARGE = "too-large"
    TOO_SLOW = "too-slow"
    NOT_APPLICABLE = "not-applicable"
    NOT_NEEDED = "not-needed"


@dataclass(frozen=True, kw_only=True)
class TrailStep:
    """One rung of the ladder and what was found there.

    Attributes:
        rung: Number on the ladder, 1-based.
        technique: Name of the technique (or set) that opens the rung.
        verdict: What became of it.
        peak_bytes: Required bytes on the GPU of the best configuration up to this rung; None when not applicable.
        shortfall_bytes: How much that is above the budget; 0 when it fits; None when not applicable.
        step_seconds: Time of one optimizer step of that configuration; None when not applicable.
        reason: One sentence.
        fidelity: Whether the technique changes numerics or only memory.
    """

    rung: int
    technique: str
    verdict: Verdict
    peak_bytes: int | None
    shortfall_bytes: int | None
    step_seconds: float | None
    reason: str
    fidelity: str = ""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the plan may use.

    Attributes:
        gpu_bytes: Per GPU: the spec's target, or capacity minus reserve.
        capacity_bytes: What torch sees of the card.
        reserve_bytes: Kept free when the target is automatic.
        host_bytes: Host memory of one node; None when the spec does not say.
        nvme_bytes: NVMe space of one node; 0 without.
        seconds: Longest allowed run; None without a limit.
        usd: Most money the run may cost; None without a limit.
        usd_per_gpu_hour: Price that money is counted with; None when unknown.
    """

    gpu_bytes: int
    capacity_bytes: int
    reserve_bytes: int
    host_bytes: int | None
    nvme_bytes: int
    seconds: float | None
    usd: float | None
    usd_per_gpu_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Why a generated key has its value: the technique that set it and what it bought.

    Attributes:
        file: Generated file.
        key: Dotted key in it.
        rung: Rung of the ladder; 0 for what the spec asked.
        technique: Technique, or "spec".
        account: Largest account it cuts; empty when none.
        bytes_saved: What the peak would be more without it; 0 when not counted.
    """

    file: str
    key: str
    rung: int
    technique: str
    account: str
    bytes_saved: int


@dataclass(frozen=True, kw_only=True)
class Certified:
    """The trace of a plan's configuration, and how it compares with the closed forms."""

    step: TracedStep
    comparison: Comparison


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A feasible answer.

    Attributes:
        name: Name of the spec file, without folder.
        config: The chosen configuration.
        run: What the script needs beyond it.
        model: Facts of the model.
        gpu: Facts of the card.
        ledger: Its bill.
        clock: Its time.
        budget: What it had to stay within.
        rung: Highest rung it uses.
        techniques: Names of the techniques switched on, in ladder order.
        trail: Every rung with its finding.
        total_steps: Optimizer steps of the whole run; None when the amount of data is unknown.
        considered: Configurations that were priced.
        facts: Keys and values of the facts used, for the lock.
        warnings: Sentences the person must read (near a failure boundary, an assumption that carries the answer).
        reasons: Why the plan is what it is: what stands in the way as asked, what lower rungs lack, what is not needed.
        traced: The trace that its total is known by; None when it is estimated.
    """

    name: str
    config: TrainingConfig
    run: RunSettings
    model: ModelFacts
    gpu: GpuFacts
    ledger: Ledger
    clock: StepTime
    budget: Budget
    rung: int
    techniques: tuple[str, ...]
    trail: tuple[TrailStep, ...]
    total_steps: int | None
    considered: int
    facts: dict[str, str]
    provenance: tuple[Provenance, ...] = ()
    warnings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    traced: Certified | None = None


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """The smallest change of one input that would make the spec feasible.

    Attributes:
        input: Spec field, for example ``memory.target``.
        now: Its value, for display.
        needed: The value that works, for display; empty when no value of this input alone works.
        reason: One sentence.
    """

    input: str
    now: str
    needed: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """The other answer: nothing fits, and why.

    Attributes:
        name: Name of the spec file.
        binding: The resource (or "time") that stops the closest configuration.
        closest_config: The configuration that comes nearest.
        closest_ledger: Its bill.
        closest_clock: Its time.
        shortfall_bytes: How far it is above the budget of the binding resource; 0 when time binds.
        budget: The limits.
        model, gpu: Facts.
        causes: Sentences, largest first.
        trail: Every rung with its shortfall.
        relaxations: Smallest changes that work.
        considered: Configurations that were priced.
    """

    name: str
    binding: Resource | str
    closest_config: TrainingConfig
    closest_ledger: Ledger
    closest_clock: StepTime
    shortfall_bytes: int
    budget: Budget
    model: ModelFacts
    gpu: GpuFacts
    causes: tuple[str, ...]
    trail: tuple[TrailStep, ...]
    relaxations: tuple[Relaxation, ...]
    considered: int
