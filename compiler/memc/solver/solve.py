"""The choice: the lowest sufficient rung, or the proof that there is none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from memc.clock import Clock
from memc.clock.rates import rates_of
from memc.config import AdapterPrecision, Optimizer, Precision, TrainingConfig
from memc.errors import MemcError
from memc.facts import GpuFacts, ModelFacts, facts_read
from memc.ledger import Estimator, ledger_facts
from memc.plan import Infeasible, Plan
from memc.solver.cadence import limit_warnings
from memc.solver.frames import Frame, Line
from memc.solver.kept import Kept
from memc.solver.limits import time_contradictions
from memc.solver.proof import infeasible
from memc.solver.provenance import provenance, used_facts
from memc.solver.reasons import reasons
from memc.solver.resolve import Question, resolve, run_settings
from memc.solver.search import Machine
from memc.solver.timed import Timed, fitting_by_time
from memc.solver.trail import trail
from memc.solver.warnings import open_bytes, warnings
from memc.spec import LoadedSpec, Objective

TIE_SHARE = 1.03


def machine_for(
    loaded: LoadedSpec,
    model: ModelFacts,
    gpu: GpuFacts,
    samples: int | None,
    *,
    evaluation_samples: int | None = None,
    margin_bytes: int = 0,
) -> Machine:
    """Returns the priced question of a spec, with `margin_bytes` of each GPU's budget kept free.

    Raises:
        MemcError: When the spec contradicts the facts, or a fact that is needed is unknown.
    """
    facts = ledger_facts(gpu)
    question = resolve(loaded, model, gpu, facts, samples, evaluation_samples)
    return machine_of(question.with_margin(margin_bytes), Estimator(model, facts))


def machine_of(question: Question, estimator: Estimator, kept: Kept | None = None) -> Machine:
    """Returns the machine of a question; the estimator is that of its model and card.

    Args:
        question: The question.
        estimator: That of its model and card.
        kept: What earlier questions about the model found; None for the first.

    Raises:
        MemcError: ``time-unknown`` or ``price-unknown`` when the spec limits what cannot be counted on this card.
    """
    kept = Kept() if kept is None else kept
    asked = question.asked
    rates = rates_of(
        question.gpu,
        asked.precision,
        asked.world_size,
        nodes=asked.nodes,
        network_bytes_per_second=question.loaded.spec.hardware.network_bytes_per_second,
    )
    problems = time_contradictions(question.loaded, question.gpu, rates)
    if problems:
        raise MemcError(tuple(problems))
    return Machine(question, estimator, Clock(question.model, rates, kept.micro_batches(question)), kept)


def solve(
    loaded: LoadedSpec,
    model: ModelFacts,
    gpu: GpuFacts,
    samples: int | None,
    *,
    evaluation_samples: int | None = None,
    margin_bytes: int = 0,
) -> Plan | Infeasible:
    """Returns the plan of a spec, or why there is none.

    Args:
        loaded: The spec.
        model: Facts of its model.
        gpu: Facts of its card.
        samples: Training samples, counted or stated; None when unknown.
        evaluation_samples: Samples of the evaluation file; None when unknown.
        margin_bytes: How much of each GPU's budget is kept free, because a trace showed that closed forms lack it.

    Raises:
        MemcError: When the spec contradicts the facts, or a fact that is needed is unknown.
    """
    with facts_read() as facts:
        machine = machine_for(
            loaded, model, gpu, samples, evaluation_samples=evaluation_samples, margin_bytes=margin_bytes
        )
        best = choose(machine)
        if best is None:
            return infeasible(machine, partial(machine_of, kept=machine.kept))
        plan = _plan(machine, best)
    return replace(plan, facts=used_facts(machine.question, plan.config, facts))


def choose(machine: Machine) -> Timed | None:
    """Returns the best configuration under the spec's objective; None when nothing fits in memory and time.

    lowest-rung: the lowest highest rung; then the method named first; then the fewest choices that change numerics;
    then what fits with all that its estimate leaves open; then least time; within 3 % of that, the fewest techniques.
    fastest and cheapest: the same without rung, method and numerics (a price per hour is the same for all).
    """
    space = machine.space()
    if machine.question.loaded.spec.objective is not Objective.LOWEST_RUNG:
        return _quickest(machine, space.pairs())
    for rung in space.rungs:
        by_preference: dict[tuple[int, int], list[tuple[Frame, Line]]] = {}
        for frame, line in space.pairs(rung):
            by_preference.setdefault(_preference(machine, frame), []).append((frame, line))
        for preference in sorted(by_preference):
            best = _quickest(machine, by_preference[preference])
            if best is not None:
                return best
    return None


def _quickest(machine: Machine, pairs: Iterable[tuple[Frame, Line]]) -> Timed | None:
    """Returns the best of some lines by time: the fastest that fits, but for the tie-break.

    What fits only if every estimate is right comes after what fits with all that its estimate leaves open.
    """
    sure: list[Timed] = []
    thin: list[Timed] = []
    for timed in fitting_by_time(machine, pairs):
        if sure and timed.seconds_per_sample > sure[0].seconds_per_sample * TIE_SHARE:
            break
        ledger = timed.candidate.price.ledger()
        (thin if open_bytes(machine.question.budget, ledger) else sure).append(timed)
    return _best(sure or thin)


def _preference(machine: Machine, frame: Frame) -> tuple[int, int]:
    """Returns the place of a frame among those of one rung: of its method, then of how much it changes numerics."""
    question = machine.question
    return question.situation.methods.index(frame.config.method), changed_numerics(frame.config, question.asked)


def _best(timed: list[Timed]) -> Timed | None:
    """Returns the fastest; of those within 3 % of it, the one with the fewest techniques."""
    if not timed:
        return None
    least = min(entry.seconds_per_sample for entry in timed)
    close = [entry for entry in timed if entry.seconds_per_sample <= least * TIE_SHARE]
    return min(
        close,
        key=lambda entry: (
            len(entry.frame.techniques) + len(entry.shape.techniques),
            entry.seconds_per_sample,
            entry.frame.totals(entry.shape).gpu,
        ),
    )


def changed_numerics(config: TrainingConfig, asked: TrainingConfig) -> int:
    """Returns how many choices that change what training computes differ from what was asked.

    A technique may change two of them at once: bf16 weights under an 8-bit optimizer are further away than either.
    """
    return sum(mine != theirs for mine, theirs in zip(_numerics(config), _numerics(asked), strict=True))


def _numerics(config: TrainingConfig) -> tuple[object, ...]:
    """Returns the choices that change what training computes; where states lie is none of them.

    Pure bf16 counts twice: it drops the fp32 weights, and the fp32 moments with them. Adapters in the type of the base
    have 16-bit weights and moments, but for DeepSpeed's, whose masters and moments stay fp32.
    """
    zero, lora = config.zero, config.lora
    return (
        config.method,
        config.precision,
        config.precision is Precision.BF16_PURE,
        config.optimizer in (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT),
        zero is not None and zero.bf16_master_weights,
        zero is not None and zero.bf16_states,
        zero is None and lora is not None and lora.precision is AdapterPrecision.BASE,
    )


def _plan(machine: Machine, best: Timed) -> Plan:
    """Returns the full record of the chosen candidate."""
    question, chosen = machine.question, best.candidate
    config = chosen.config
    steps = machine.total_steps(config)
    epochs = question.loaded.spec.training.epochs
    per_epoch = None if steps is None or not epochs else max(1, round(steps / epochs))
    total = best.time.total_seconds
    mean = best.time.step_seconds if total is None or not steps else total / steps
    climbed = trail(machine, chosen)
    run = run_settings(question.loaded, config, per_epoch, mean)
    return Plan(
        name=question.loaded.name,
        config=config,
        run=run,
        model=question.model,
        gpu=question.gpu,
        ledger=chosen.price.ledger(),
        clock=best.time,
        budget=question.budget,
        rung=chosen.rung,
        techniques=tuple(technique.name for technique in chosen.techniques),
        trail=climbed,
        total_steps=steps,
        considered=machine.space().considered,
        facts={},
        provenance=provenance(machine, chosen),
        warnings=(*limit_warnings(run, best.time), *warnings(machine, chosen, best.time)),
        reasons=reasons(machine, best, climbed),
    )
