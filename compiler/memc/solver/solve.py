"""The choice: the lowest sufficient rung, or the proof that there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memc.clock import Clock, StepTime, clock_facts
from memc.config import TrainingConfig
from memc.facts import GpuFacts, ModelFacts, facts_read
from memc.ledger import Estimator, ledger_facts
from memc.plan import Infeasible, Plan
from memc.solver.proof import infeasible
from memc.solver.provenance import provenance, used_facts
from memc.solver.resolve import resolve, run_settings
from memc.solver.search import Candidate, Machine
from memc.solver.trail import trail
from memc.solver.warnings import warnings
from memc.spec import LoadedSpec, Objective

TIE_SHARE = 1.03


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate that fits, with its time."""

    candidate: Candidate
    time: StepTime

    @property
    def seconds_per_sample(self) -> float:
        """Step time over the samples of the step."""
        return self.time.step_seconds / self.candidate.config.global_batch_size


def machine_for(loaded: LoadedSpec, model: ModelFacts, gpu: GpuFacts, samples: int | None) -> Machine:
    """Returns the priced question of a spec.

    Raises:
        MemcError: When the spec contradicts the facts, or a fact that is needed is unknown.
    """
    facts = ledger_facts(gpu)
    question = resolve(loaded, model, gpu, facts, samples)
    clock = Clock(model, clock_facts(gpu, question.asked.precision, question.asked.world_size))
    return Machine(question, Estimator(model, facts), clock)


def solve(loaded: LoadedSpec, model: ModelFacts, gpu: GpuFacts, samples: int | None) -> Plan | Infeasible:
    """Returns the plan of a spec, or why there is none.

    Args:
        loaded: The spec.
        model: Facts of its model.
        gpu: Facts of its card.
        samples: Training samples, counted or stated; None when unknown.

    Raises:
        MemcError: When the spec contradicts the facts, or a fact that is needed is unknown.
    """
    with facts_read() as facts:
        machine = machine_for(loaded, model, gpu, samples)
        candidates = machine.candidates()
        best = choose(machine, candidates)
        if best is None:
            return infeasible(machine, candidates)
        plan = _plan(machine, candidates, best)
    return replace(plan, facts=used_facts(machine.question, plan.config, facts))


def choose(machine: Machine, candidates: list[Candidate]) -> Timed | None:
    """Returns the best candidate under the spec's objective; None when nothing fits in memory and time.

    lowest-rung: the lowest highest rung; then the method named first; then the fewest choices that change numerics;
    then least time; within 3 % of that, the fewest techniques.
    fastest and cheapest: least time (a price per hour is the same for all), same tie-break.
    """
    fitting = [candidate for candidate in candidates if machine.fits(candidate.price)]
    timed = [Timed(candidate, machine.time(candidate.config)) for candidate in fitting]
    timed = [entry for entry in timed if machine.in_time(entry.time)]
    if not timed:
        return None
    if machine.question.loaded.spec.objective is Objective.LOWEST_RUNG:
        lowest = min(entry.candidate.rung for entry in timed)
        timed = [entry for entry in timed if entry.candidate.rung == lowest]
        methods = machine.question.situation.methods
        preferred = min(methods.index(entry.candidate.config.method) for entry in timed)
        timed = [entry for entry in timed if entry.candidate.config.method is methods[preferred]]
        asked = machine.question.asked
        fewest = min(_numerics(entry.candidate.config, asked) for entry in timed)
        timed = [entry for entry in timed if _numerics(entry.candidate.config, asked) == fewest]
    least = min(entry.seconds_per_sample for entry in timed)
    close = [entry for entry in timed if entry.seconds_per_sample <= least * TIE_SHARE]
    return min(
        close,
        key=lambda entry: (
            len(entry.candidate.techniques),
            entry.seconds_per_sample,
            entry.candidate.price.gpu_required_bytes,
        ),
    )


def _numerics(config: TrainingConfig, asked: TrainingConfig) -> int:
    """Returns how many choices that change what training computes differ from what was asked.

    A technique may change two of them at once: bf16 weights under an 8-bit optimizer are further away than either.
    """
    return sum(getattr(config, name) != getattr(asked, name) for name in ("method", "precision", "optimizer"))


def _plan(machine: Machine, candidates: list[Candidate], best: Timed) -> Plan:
    """Returns the full record of the chosen candidate."""
    question, chosen = machine.question, best.candidate
    config = chosen.config
    steps = machine.total_steps(config)
    epochs = question.loaded.spec.training.epochs
    per_epoch = None if steps is None or not epochs else max(1, round(steps / epochs))
    total = best.time.total_seconds
    mean = best.time.step_seconds if total is None or not steps else total / steps
    return Plan(
        name=question.loaded.name,
        config=config,
        run=run_settings(question.loaded, config, per_epoch, mean),
        model=question.model,
        gpu=question.gpu,
        ledger=chosen.price.ledger(),
        clock=best.time,
        budget=question.budget,
        rung=chosen.rung,
        techniques=tuple(technique.name for technique in chosen.techniques),
        trail=trail(machine, candidates, chosen),
        total_steps=steps,
        considered=len(candidates),
        facts={},
        provenance=provenance(machine, candidates, chosen),
        warnings=warnings(machine, chosen, best.time),
    )
