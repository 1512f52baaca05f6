"""The refusal: what stops the closest configuration, and the smallest change of each input that would work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from memc.config import Engine, Method, Precision, TrainingConfig
from memc.errors import MemcError
from memc.ladder import LADDER
from memc.ledger import Account, Ledger, Resource
from memc.plan import Infeasible, Relaxation
from memc.solver.resolve import Question, resolve
from memc.solver.search import Candidate, Machine
from memc.solver.trail import least_memory, trail
from memc.units import GIB, MIB, ceil_div, format_gib, format_seconds

_CARD_COUNTS = (2, 4, 8)
_SHORTEST = 128


def infeasible(machine: Machine, candidates: list[Candidate]) -> Infeasible:
    """Returns why nothing fits.

    Args:
        machine: The priced question.
        candidates: Everything that was considered; empty when techniques that are required exclude each other.
    """
    question = machine.question
    impossible = _impossible(question) if not candidates else ""
    if impossible:
        only = question.asked
        candidates = [Candidate(only, (), 1, machine.estimator.price(only))]
    fitting = [candidate for candidate in candidates if machine.fits(candidate.price)]
    if fitting:
        closest = min(fitting, key=lambda candidate: machine.time(candidate.config).total_seconds or 0.0)
    else:
        closest = least_memory(machine, candidates)
    ledger = closest.price.ledger()
    binding = "time" if fitting else _binding(machine, closest)
    return Infeasible(
        name=question.loaded.name,
        binding=binding,
        closest_config=closest.config,
        closest_ledger=ledger,
        closest_clock=machine.time(closest.config),
        shortfall_bytes=0 if fitting else _shortfall(machine, closest, binding),
        budget=question.budget,
        model=question.model,
        gpu=question.gpu,
        causes=((impossible,) if impossible else ()) + _causes(machine, closest, ledger, binding),
        trail=trail(machine, candidates, None),
        relaxations=_without_requirements(question, impossible) or _relaxations(machine, candidates, binding),
        considered=len(candidates),
    )


def _impossible(question: Question) -> str:
    """Returns why no configuration has every technique that the spec requires."""
    required = [technique for technique in LADDER if technique.name in question.required]
    found = []
    for technique in required:
        reason = technique.why_not(question.asked, question.situation)
        if technique.dimension in question.frozen:
            reason = "a pin decides what it would decide"
        if reason is not None:
            found.append(f"{technique.name}: {reason}")
    names = ", ".join(technique.name for technique in required)
    why = "; ".join(found) or "they exclude each other"
    return f"no configuration can use {names}, which ladder.require names ({why})"


def _without_requirements(question: Question, impossible: str) -> tuple[Relaxation, ...]:
    """Returns the one way out when the requirements cannot hold; nothing when they can."""
    if not impossible:
        return ()
    now = ", ".join(sorted(question.required))
    return (Relaxation(input="ladder.require", now=now, needed="nothing", reason="what it names cannot be used here"),)


def _binding(machine: Machine, candidate: Candidate) -> Resource:
    over_gpu = candidate.price.gpu_required_bytes > machine.question.budget.gpu_bytes
    return Resource.GPU if over_gpu else Resource.HOST


def _shortfall(machine: Machine, candidate: Candidate, binding: Resource | str) -> int:
    budget = machine.question.budget
    if binding is Resource.GPU:
        return candidate.price.gpu_required_bytes - budget.gpu_bytes
    return candidate.price.host_required_bytes - (budget.host_bytes or 0)


def _causes(machine: Machine, closest: Candidate, ledger: Ledger, binding: Resource | str) -> tuple[str, ...]:
    """Returns sentences on what stops the closest configuration, largest first."""
    budget, asked = machine.question.budget, machine.estimator.ledger(machine.question.asked)
    if binding == "time":
        time = machine.time(closest.config)
        limit = f"${budget.usd:g}" if budget.usd is not None else format_seconds(budget.seconds or 0.0)
        took = format_seconds(time.total_seconds or 0.0)
        cost = f" and ${time.total_usd:.2f}" if time.total_usd is not None else ""
        return (f"the fastest plan that fits takes {took}{cost}; the budget is {limit}",)
    bill = ledger.gpu if binding is Resource.GPU else ledger.host
    limit_bytes = budget.gpu_bytes if binding is Resource.GPU else budget.host_bytes or 0
    accounts = sorted(bill.by_account().items(), key=lambda item: -item[1])
    largest = ", ".join(f"{account} {format_gib(size)}" for account, size in accounts if size)
    where = "each GPU" if binding is Resource.GPU else "the host"
    return (
        f"as asked, it needs {format_gib(asked.gpu.required_bytes)} on each GPU, in phase {asked.gpu.binding_phase}",
        f"at best it needs {format_gib(bill.required_bytes)} on {where} in phase {bill.binding_phase}; the budget is "
        f"{format_gib(limit_bytes)}",
        f"there: {largest}",
        _wall(accounts[0][0]),
    )


def _wall(account: Account) -> str:
    if account is Account.ACTIVATIONS:
        return "the wall is dynamic: activations grow with micro-batch and length"
    if account is Account.WORKSPACE:
        return "the wall is workspace: buffers and context that do not shrink with the model"
    return "the wall is static: weights, gradients and states, whatever the batch"


def _relaxations(machine: Machine, candidates: list[Candidate], binding: Resource | str) -> tuple[Relaxation, ...]:
    """Returns the smallest change of each input that alone makes the spec feasible."""
    question = machine.question
    spec, budget = question.loaded.spec, question.budget
    found: list[Relaxation] = []
    in_time = [candidate for candidate in candidates if machine.in_time(machine.time(candidate.config))]
    if binding == "time":
        fitting = [machine.time(candidate.config) for candidate in candidates if machine.fits(candidate.price)]
        seconds = min(time.total_seconds or 0.0 for time in fitting)
        costs = [time.total_usd for time in fitting if time.total_usd is not None]
        by_money = budget.usd is not None and costs
        needed = f"${math.ceil(min(costs) * 100) / 100:.2f}" if by_money else f"{math.ceil(seconds / 360) / 10:.1f}h"
        now = spec.time.budget.text if spec.time.budget else "none"
        found.append(Relaxation(input="time.budget", now=now, needed=needed, reason="the fastest plan that fits"))
    else:
        found += _memory_relaxations(machine, in_time or candidates)
    if question.asked.max_length > _SHORTEST:
        found += _shorter(machine)
    found += _more_cards(machine)
    found += _other_methods(machine)
    found += _without_pins(machine)
    return tuple(found)


def _without_pins(machine: Machine) -> list[Relaxation]:
    """Returns the pins of which one alone, once removed, lets the solver find a plan."""
    question, pin = machine.question, machine.question.loaded.spec.pin
    found = []
    for name in type(pin).model_fields:
        value = getattr(pin, name)
        if value is None:
            continue
        spec = question.loaded.spec.model_copy(update={"pin": pin.model_copy(update={name: None})})
        try:
            other = resolve(
                replace(question.loaded, spec=spec), question.model, question.gpu, machine.estimator.facts, None
            )
        except MemcError:
            continue  # the other pins make no sense without this one
        other = replace(other, samples=question.samples, length_share=question.length_share)
        if _feasible_with(machine, lambda config: config, other):
            found.append(
                Relaxation(
                    input=f"pin.{name}",
                    now=str(value),
                    needed="not pinned",
                    reason="memc then finds a plan that fits",
                )
            )
    return found


def _memory_relaxations(machine: Machine, candidates: list[Candidate]) -> list[Relaxation]:
    """Returns how much GPU or host memory would do."""
    budget, found = machine.question.budget, []
    host_ok = [
        candidate.price.gpu_required_bytes
        for candidate in candidates
        if budget.host_bytes is None or candidate.price.host_required_bytes <= budget.host_bytes
    ]
    needed = min(host_ok, default=0)
    if budget.gpu_bytes < needed <= budget.capacity_bytes:
        found.append(
            Relaxation(
                input="memory.target",
                now=format_gib(budget.gpu_bytes),
                needed=_target_text(needed, budget.capacity_bytes),
                reason="of GPU memory on each card, all techniques that the spec allows in use",
            )
        )
    elif needed > budget.capacity_bytes:
        found.append(
            Relaxation(
                input="hardware.gpu",
                now=f"{machine.question.gpu.key} ({format_gib(budget.capacity_bytes)})",
                needed=f"a card of {ceil_div(needed, GIB)} GiB",
                reason="GPU memory with every technique that the spec allows in use; memc gpus lists capacities",
            )
        )
    gpu_ok = [c.price.host_required_bytes for c in candidates if c.price.gpu_required_bytes <= budget.gpu_bytes]
    if budget.host_bytes is not None and gpu_ok and min(gpu_ok) > budget.host_bytes:
        found.append(
            Relaxation(
                input="hardware.host_memory",
                now=format_gib(budget.host_bytes),
                needed=f"{ceil_div(min(gpu_ok), GIB)}GiB",
                reason="of host memory, offloaded states and pinned buffers included",
            )
        )
    if budget.host_bytes is None and not gpu_ok:
        found += _with_host_memory(machine)
    return found


def _target_text(needed_bytes: int, capacity_bytes: int) -> str:
    """Returns a size that a spec can hold: not below what is needed, not above what the card has."""
    tenths = ceil_div(needed_bytes * 10, GIB)
    return f"{tenths / 10:g}GiB" if tenths * GIB <= capacity_bytes * 10 else f"{ceil_div(needed_bytes, MIB)}MiB"


def _with_host_memory(machine: Machine) -> list[Relaxation]:
    """Returns the host memory with which offload would fit, when the spec gives none."""
    question = machine.question
    unlimited = replace(
        question,
        situation=replace(question.situation, host_bytes=2**62),
        budget=replace(question.budget, host_bytes=2**62),
    )
    other = Machine(unlimited, machine.estimator, machine.clock)
    needs = [
        candidate.price.host_required_bytes
        for candidate in other.candidates()
        if other.fits(candidate.price) and other.in_time(other.time(candidate.config))
    ]
    if not needs:
        return []
    return [
        Relaxation(
            input="hardware.host_memory",
            now="not given",
            needed=f"{ceil_div(min(needs), GIB)}GiB",
            reason="with optimizer or parameters offloaded to the host",
        )
    ]


def _feasible_with(machine: Machine, change: Callable[[TrainingConfig], TrainingConfig], question: Question) -> bool:
    """Whether some configuration fits in memory and time once the asked configuration is changed."""
    other = Machine(replace(question, asked=change(question.asked)), machine.estimator, machine.clock)
    return any(
        other.fits(candidate.price) and other.in_time(other.time(candidate.config)) for candidate in other.candidates()
    )


def _shorter(machine: Machine) -> list[Relaxation]:
    """Returns the longest max_length (a multiple of 128) that fits."""
    question = machine.question
    least = question.loaded.spec.data.mean_tokens or 0
    low, high = 0, question.asked.max_length // _SHORTEST
    if question.asked.max_length % _SHORTEST == 0:
        high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        length = middle * _SHORTEST
        if _feasible_with(machine, _with_length(length), question):
            low = middle
        else:
            high = middle - 1
    if low * _SHORTEST < max(least, 1):
        return []
    return [
        Relaxation(
            input="data.max_length",
            now=str(question.asked.max_length),
            needed=str(low * _SHORTEST),
            reason="the longest sequence that fits (in steps of 128)",
        )
    ]


def _with_length(length: int) -> Callable[[TrainingConfig], TrainingConfig]:
    return lambda config: replace(config, max_length=length)


def _more_cards(machine: Machine) -> list[Relaxation]:
    """Returns the fewest cards in one node that fit, among the usual counts."""
    question = machine.question
    spec = question.loaded.spec
    for count in _CARD_COUNTS:
        if count <= spec.hardware.count or spec.training.global_batch_size % count or spec.pin.micro_batch_size:
            continue
        scale = count // spec.hardware.count if count % spec.hardware.count == 0 else 0
        if not scale or question.asked.micro_batch_size % scale:
            continue

        def change(config: TrainingConfig, count: int = count, scale: int = scale) -> TrainingConfig:
            engine = Engine.DDP if config.engine is Engine.SINGLE else config.engine
            return replace(
                config, gpus_per_node=count, micro_batch_size=config.micro_batch_size // scale, engine=engine
            )

        if _feasible_with(machine, change, question):
            return [
                Relaxation(
                    input="hardware.count",
                    now=str(spec.hardware.count),
                    needed=str(count),
                    reason="cards of the same kind in one node",
                )
            ]
    return []


def _other_methods(machine: Machine) -> list[Relaxation]:
    """Returns the method nearest to full training that would fit, when the spec rules it out."""
    question = machine.question
    for method in (Method.LORA, Method.QLORA):
        if method in question.situation.methods or question.asked.precision is Precision.FP32:
            continue
        allowed = (*question.situation.methods, method)
        wider = replace(question, situation=replace(question.situation, methods=allowed))
        if _feasible_with(machine, lambda config: config, wider):
            return [
                Relaxation(
                    input="method",
                    now=", ".join(question.situation.methods),
                    needed=", ".join(allowed),
                    reason=f"{method} fits on this hardware",
                )
            ]
    return []
