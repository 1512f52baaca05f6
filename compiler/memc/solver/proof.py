"""The refusal: what stops the closest configuration, and the smallest change of each input that would work."""

from __future__ import annotations

from memc.ladder import LADDER
from memc.ledger import Account, Ledger, Resource
from memc.ledger.entries import Moment
from memc.plan import Infeasible
from memc.solver.frames import Candidate
from memc.solver.relaxations import Rebuild, relaxations
from memc.solver.resolve import Question
from memc.solver.search import Machine
from memc.solver.trail import trail
from memc.solver.walls import loss_wall, states_wall
from memc.solver.warnings import SPILLS, may_spill, pinned_bytes, whole_vocabulary
from memc.units import format_gib, format_seconds


def infeasible(machine: Machine, rebuild: Rebuild) -> Infeasible:
    """Returns why nothing fits.

    Args:
        machine: The priced question.
        rebuild: Returns the machine of a question that differs from it.
    """
    question, space = machine.question, machine.space()
    impossible = "" if space.considered else _impossible(question)
    nearest = space.least_memory()
    if nearest is None:
        closest, fits = Candidate(question.asked, (), 1, machine.estimator.price(question.asked)), False
    else:
        closest, fits = nearest[0].candidate(nearest[1]), nearest[0].totals(nearest[1]).within(question.budget)
    if fits:
        fastest = min(space.fitting(), key=lambda pair: machine.time(pair[0].with_shape(pair[1])).step_seconds)
        closest = fastest[0].candidate(fastest[1])
    ledger = closest.price.ledger()
    binding = "time" if fits else _binding(machine, closest)
    return Infeasible(
        name=question.loaded.name,
        binding=binding,
        closest_config=closest.config,
        closest_ledger=ledger,
        closest_clock=machine.time(closest.config),
        shortfall_bytes=0 if fits else _shortfall(machine, closest, binding),
        budget=question.budget,
        model=question.model,
        gpu=question.gpu,
        causes=((impossible,) if impossible else ()) + _causes(machine, closest, ledger, binding),
        trail=trail(machine, None),
        relaxations=relaxations(machine, rebuild, too_slow=fits),
        considered=space.considered,
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


def _binding(machine: Machine, candidate: Candidate) -> Resource:
    price, budget = candidate.price, machine.question.budget
    if price.gpu_required_bytes > budget.gpu_bytes:
        return Resource.GPU
    over_host = budget.host_bytes is not None and candidate.needs.host > budget.host_bytes
    return Resource.HOST if over_host else Resource.NVME


def _shortfall(machine: Machine, candidate: Candidate, binding: Resource | str) -> int:
    budget = machine.question.budget
    if binding is Resource.GPU:
        return candidate.price.gpu_required_bytes - budget.gpu_bytes
    if binding is Resource.NVME:
        return candidate.price.nvme_required_bytes - budget.nvme_bytes
    return candidate.needs.host - (budget.host_bytes or 0)


def _causes(machine: Machine, closest: Candidate, ledger: Ledger, binding: Resource | str) -> tuple[str, ...]:
    """Returns sentences on what stops the closest configuration, largest first."""
    budget, asked = machine.question.budget, machine.estimator.ledger(machine.question.asked)
    if binding == "time":
        time = machine.time(closest.config)
        limit = f"${budget.usd:g}" if budget.usd is not None else format_seconds(budget.seconds or 0.0)
        took = format_seconds(time.total_seconds or 0.0)
        cost = f" and ${time.total_usd:.2f}" if time.total_usd is not None else ""
        return (f"the fastest plan that fits takes {took}{cost}; the budget is {limit}",)
    assert isinstance(binding, Resource)
    bill = ledger.of(binding)
    limits = {Resource.GPU: budget.gpu_bytes, Resource.HOST: budget.host_bytes or 0, Resource.NVME: budget.nvme_bytes}
    limit_bytes = limits[binding]
    moment = max((item for item in Moment if item is not Moment.RESUME), key=lambda item: bill.by_moment[item])
    needs = closest.needs
    size = {Resource.GPU: needs.gpu, Resource.HOST: needs.host, Resource.NVME: needs.nvme}[binding]
    at = moment if binding is Resource.HOST else bill.binding_moment
    accounts = sorted(bill.by_account(at).items(), key=lambda item: -item[1])
    largest = ", ".join(f"{account} {format_gib(size)}" for account, size in accounts if size)
    where = {Resource.GPU: "each GPU", Resource.HOST: "the host", Resource.NVME: "the drive"}[binding]
    return (
        f"as asked, it needs {format_gib(asked.gpu.required_bytes)} on each GPU, in phase {asked.gpu.binding_phase}",
        f"at best it needs {format_gib(size)} on {where} in phase {at.phase}; the budget is {format_gib(limit_bytes)}",
        f"there: {largest}",
        *_of_the_host(binding, ledger),
        _wall(accounts[0][0]),
        *(loss_wall(machine, closest.config) if binding is Resource.GPU and at is Moment.LOSS else ()),
        *(states_wall(machine) if binding is Resource.GPU else ()),
        *(whole_vocabulary(machine.question, closest.config) if binding is Resource.GPU else ()),
        *((SPILLS,) if binding is Resource.GPU and may_spill(machine.question, size) else ()),
    )


def _of_the_host(binding: Resource, ledger: Ledger) -> tuple[str, ...]:
    pinned = pinned_bytes(ledger)
    if binding is not Resource.HOST or not pinned:
        return ()
    return (f"of it {format_gib(pinned)} is pinned, in blocks that torch rounds up to powers of two",)


def _wall(account: Account) -> str:
    if account is Account.ACTIVATIONS:
        return "the wall is dynamic: activations grow with micro-batch and length"
    if account is Account.WORKSPACE:
        return "the wall is workspace: buffers and context that do not shrink with the model"
    return "the wall is static: weights, gradients and states, whatever the batch"
