"""The smallest change of each input of a refused spec that alone would do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from memc.config import Method, Precision
from memc.errors import MemcError
from memc.ladder import with_micro_batch
from memc.ledger.estimate import Estimator
from memc.plan import Relaxation
from memc.solver.frames import Totals
from memc.solver.images import image_settings, image_tokens_of, image_tower
from memc.solver.resolve import Question, host_bytes_for, resolve
from memc.solver.search import Machine
from memc.spec import LoadedSpec, Size, Spec
from memc.spec_checks import contradictions
from memc.spec_values import MAX_SIZE_BYTES
from memc.units import GIB, MIB, ceil_div, format_gib

_CARD_COUNTS = (2, 4, 8)
_NODE_COUNTS = (2, 4, 8, 16)
_SHORTEST = 128

Rebuild = Callable[[Question, Estimator], Machine]


def relaxations(machine: Machine, rebuild: Rebuild, *, too_slow: bool) -> tuple[Relaxation, ...]:
    """Returns the smallest change of each input that alone makes the spec feasible, each of them tried.

    Args:
        machine: The question that has no plan.
        rebuild: Returns the machine of a question that differs from it.
        too_slow: Whether something fits in memory and only the time budget is missed.
    """
    variations = _Variations(machine, rebuild)
    found = _time(machine) if too_slow else [*_memory(machine), *_host_not_given(variations)]
    found += _shorter(variations)
    found += _smaller_images(variations)
    found += _smaller_batch(variations)
    found += _more_cards(variations)
    found += _other_methods(variations)
    found += _without_pins(variations)
    found += _without_ladder(variations)
    return tuple(found)


class _Variations:
    """Variations of the refused spec, tried one by one."""

    def __init__(self, machine: Machine, rebuild: Rebuild) -> None:
        self.machine = machine
        self.question = machine.question
        self.spec = machine.question.loaded.spec
        self._rebuild = rebuild

    def feasible(self, **changes: dict[str, Any] | Any) -> bool:
        """Whether the spec has a plan once fields of its sections are changed; not when it contradicts itself then."""
        machine = self.changed(**changes)
        return machine is not None and _has_plan(machine)

    def changed(self, **changes: dict[str, Any] | Any) -> Machine | None:
        """Returns the machine of a variation; None when it contradicts itself or the facts."""
        updates = {
            name: getattr(self.spec, name).model_copy(update=change) if isinstance(change, dict) else change
            for name, change in changes.items()
        }
        return self._machine(self.spec.model_copy(update=updates))

    def _machine(self, spec: Spec) -> Machine | None:
        question, loaded = self.question, self.question.loaded
        if contradictions(spec):
            return None
        varied = LoadedSpec(spec=spec, path=loaded.path, text=loaded.text, document=loaded.document)
        try:
            estimator = self.machine.estimator
            varied_question = resolve(
                varied,
                question.model,
                question.gpu,
                estimator.facts,
                question.given_samples,
                question.evaluation_samples,
            )
            return self._rebuild(varied_question.with_margin(question.margin_bytes), estimator)
        except MemcError:
            return None


def _has_plan(machine: Machine) -> bool:
    """Whether something fits in memory and time."""
    fitting = machine.space().fitting()
    return any(machine.in_time(machine.time(frame.with_shape(shape))) for frame, shape in fitting)


def _time(machine: Machine) -> list[Relaxation]:
    """Returns the time or money that the plan which fits in memory takes."""
    question, budget = machine.question, machine.question.budget
    fitting = [machine.time(frame.with_shape(shape)) for frame, shape in machine.space().fitting()]
    seconds = min(time.total_seconds or 0.0 for time in fitting)
    costs = [time.total_usd for time in fitting if time.total_usd is not None]
    by_money = budget.usd is not None and costs
    needed = f"${math.ceil(min(costs) * 100) / 100:.2f}" if by_money else f"{math.ceil(seconds / 360) / 10:.1f}h"
    limit = question.loaded.spec.time.budget
    now = limit.text if limit else "none"
    return [Relaxation(input="time.budget", now=now, needed=needed, reason="the fastest plan that fits")]


def _memory(machine: Machine) -> list[Relaxation]:
    """Returns how much memory of the card, of the host or of the drive would do, the others as they are."""
    budget, found = machine.question.budget, []
    host = 2**62 if budget.host_bytes is None else budget.host_bytes
    gpu = _least(
        machine,
        lambda need: need.host <= host and need.nvme <= budget.nvme_bytes,
        lambda need: need.gpu,
        budget.gpu_bytes,
    )
    if gpu is not None:
        gpu += machine.question.margin_bytes  # of any target, so much is kept free
    if gpu is not None and gpu <= budget.capacity_bytes:
        found.append(
            Relaxation(
                input="memory.target",
                now=format_gib(budget.gpu_bytes),
                needed=_target_text(gpu, budget.capacity_bytes),
                reason="of GPU memory on each card, all techniques that the spec allows in use",
            )
        )
    elif gpu is not None:
        found.append(
            Relaxation(
                input="hardware.gpu",
                now=f"{machine.question.gpu.key} ({format_gib(budget.capacity_bytes)})",
                needed=f"a card of {ceil_div(gpu, GIB)} GiB",
                reason="GPU memory with every technique that the spec allows in use; memc gpus lists capacities",
            )
        )
    if budget.host_bytes is not None:
        found += _host(machine, budget.host_bytes)
    if budget.nvme_bytes:
        nvme = _least(
            machine,
            lambda need: need.gpu <= budget.gpu_bytes and need.host <= host,
            lambda need: need.nvme,
            budget.nvme_bytes,
        )
        if nvme is not None:
            now, needed = format_gib(budget.nvme_bytes), f"{ceil_div(nvme, GIB)}GiB"
            found.append(Relaxation(input="hardware.nvme", now=now, needed=needed, reason="of the drive of one node"))
    return found


def _host(machine: Machine, host_bytes: int) -> list[Relaxation]:
    budget = machine.question.budget
    needed = _least(
        machine,
        lambda need: need.gpu <= budget.gpu_bytes and need.nvme <= budget.nvme_bytes,
        lambda need: need.host,
        host_bytes,
    )
    if needed is None:
        return []
    given = machine.question.loaded.spec.hardware.host_memory
    return [
        Relaxation(
            input="hardware.host_memory",
            now=given.text if given is not None else "not given",
            needed=f"{ceil_div(host_bytes_for(needed), GIB)}GiB",
            reason="of host memory of one node, offloaded states and pinned buffers included",
        )
    ]


def _least(
    machine: Machine, others_fit: Callable[[Totals], bool], amount: Callable[[Totals], int], now: int
) -> int | None:
    """Returns the least of one resource that does, in time; None where `now` does or nothing would.

    Everything that a configuration needs rises along a line, so the first shape of a line is its least; only where
    time is limited a later one may be the first that is in time.
    """
    limited = machine.question.budget.seconds is not None or machine.question.budget.usd is not None
    best: int | None = None
    for frame, line in machine.space().pairs():
        for shape in line.shapes if limited else line.shapes[:1]:
            totals = frame.totals(shape)
            size = amount(totals)
            if not others_fit(totals) or (best is not None and size >= best):
                break
            if not limited or machine.in_time(machine.time(frame.with_shape(shape))):
                best = size
                break
    return None if best is None or best <= now else best


def _target_text(needed_bytes: int, capacity_bytes: int) -> str:
    """Returns a size that a spec can hold: not below what is needed, not above what the card has."""
    tenths = ceil_div(needed_bytes * 10, GIB)
    return f"{tenths / 10:g}GiB" if tenths * GIB <= capacity_bytes * 10 else f"{ceil_div(needed_bytes, MIB)}MiB"


def _host_not_given(variations: _Variations) -> list[Relaxation]:
    """Returns the host memory with which offload would fit, when the spec gives none."""
    if variations.question.budget.host_bytes is not None:
        return []
    machine = variations.changed(hardware={"host_memory": Size(bytes=MAX_SIZE_BYTES, text="plenty")})
    if machine is None:
        return []
    fitting = machine.space().fitting()
    needs = [
        frame.totals(shape).host for frame, shape in fitting if machine.in_time(machine.time(frame.with_shape(shape)))
    ]
    if not needs:
        return []
    return [
        Relaxation(
            input="hardware.host_memory",
            now="not given",
            needed=f"{ceil_div(host_bytes_for(min(needs)), GIB)}GiB",
            reason="with optimizer or parameters offloaded to the host",
        )
    ]


def _shorter(variations: _Variations) -> list[Relaxation]:
    """Returns the longest max_length (a multiple of 128) that fits."""
    data = variations.spec.data
    low, high = 0, (data.max_length - 1) // _SHORTEST
    while low < high:
        middle = (low + high + 1) // 2
        if variations.feasible(data={"max_length": middle * _SHORTEST}):
            low = middle
        else:
            high = middle - 1
    if low * _SHORTEST < max(data.mean_tokens or 0, 1):
        return []
    return [
        Relaxation(
            input="data.max_length",
            now=str(data.max_length),
            needed=str(low * _SHORTEST),
            reason="the longest sequence that fits (in steps of 128)",
        )
    ]


def _smaller_images(variations: _Variations) -> list[Relaxation]:
    """Returns the most pixels of an image that fit, in steps of one token; nothing where images have one size."""
    data, model = variations.spec.data, variations.question.model
    tower = image_tower(model)
    if tower is None or tower.patches is None or not image_tokens_of(data, model):
        return []
    _, now = image_settings(data, model)
    step = (tower.patches.side * tower.patches.merge) ** 2
    low, high = 0, now // step - 1
    while low < high:
        middle = (low + high + 1) // 2
        if variations.feasible(data={"image_pixels": middle * step}):
            low = middle
        else:
            high = middle - 1
    if not low:
        return []
    return [
        Relaxation(
            input="data.image_pixels",
            now=str(now),
            needed=str(low * step),
            reason=f"the largest images that fit: {low} tokens each (max_pixels of the model's processor)",
        )
    ]


def _smaller_batch(variations: _Variations) -> list[Relaxation]:
    """Returns the largest micro-batch that fits below a pinned one; the samples of a step stay as they are."""
    pinned, per_rank = variations.spec.pin.micro_batch_size, variations.question.asked
    if pinned is None:
        return []
    samples = per_rank.micro_batch_size * per_rank.gradient_accumulation_steps
    for size in (size for size in range(pinned - 1, 0, -1) if samples % size == 0):
        if variations.feasible(pin={"micro_batch_size": size, "gradient_accumulation_steps": None}):
            change = with_micro_batch(per_rank, size)
            return [
                Relaxation(
                    input="pin.micro_batch_size",
                    now=str(pinned),
                    needed=str(size),
                    reason=f"the largest that fits, with {change.gradient_accumulation_steps} micro-batches a step",
                )
            ]
    return []


def _more_cards(variations: _Variations) -> list[Relaxation]:
    """Returns the fewest cards of one node that fit, else the fewest nodes, among the usual counts.

    Where the samples of a step do not divide by the cards, the step grows to the next multiple, and both are named.
    """
    hardware = variations.spec.hardware
    for count in (count for count in _CARD_COUNTS if count > hardware.count and hardware.nodes == 1):
        found = _on(variations, "hardware.count", hardware.count, count, count)
        if found is not None:
            return [found]
    for nodes in (nodes for nodes in _NODE_COUNTS if nodes > hardware.nodes and hardware.count in _CARD_COUNTS):
        found = _on(variations, "hardware.nodes", hardware.nodes, nodes, hardware.count * nodes)
        if found is not None:
            return [found]
    return []


def _on(variations: _Variations, field: str, now: int, needed: int, cards: int) -> Relaxation | None:
    spec = variations.spec
    name = field.removeprefix("hardware.")
    what = "cards of the same kind in one node" if name == "count" else f"nodes of {spec.hardware.count} such cards"
    batch = spec.training.global_batch_size
    if batch % cards == 0:
        if variations.feasible(hardware={name: needed}):
            return Relaxation(input=field, now=str(now), needed=str(needed), reason=what)
        return None
    if "global_batch_size" in spec.training.model_fields_set and spec.pin.gradient_accumulation_steps:
        return None
    larger = ceil_div(batch, cards) * cards
    if not variations.feasible(hardware={name: needed}, training={"global_batch_size": larger}):
        return None
    return Relaxation(
        input=f"{field}, training.global_batch_size",
        now=f"{now}, {batch}",
        needed=f"{needed}, {larger}",
        reason=f"{what}; {batch} samples of a step do not divide by {cards} cards",
    )


def _other_methods(variations: _Variations) -> list[Relaxation]:
    """Returns the method nearest to full training that would fit, when the spec rules it out."""
    question = variations.question
    for method in (Method.LORA, Method.QLORA):
        if method in question.situation.methods or question.asked.precision is Precision.FP32:
            continue
        allowed = (*question.situation.methods, method)
        if variations.feasible(method=allowed):
            return [
                Relaxation(
                    input="method",
                    now=", ".join(question.situation.methods),
                    needed=", ".join(allowed),
                    reason=f"{method} fits on this hardware",
                )
            ]
    return []


def _without_pins(variations: _Variations) -> list[Relaxation]:
    """Returns the pins of which one alone, once removed, lets the solver find a plan."""
    pin = variations.spec.pin
    return [
        Relaxation(
            input=f"pin.{name}",
            now=str(getattr(pin, name)),
            needed="not pinned",
            reason="memc then finds a plan that fits",
        )
        for name in type(pin).model_fields
        if getattr(pin, name) is not None and name != "micro_batch_size" and variations.feasible(pin={name: None})
    ]


def _without_ladder(variations: _Variations) -> list[Relaxation]:
    """Returns the ruled out or required techniques of which one alone, once left open, lets the solver find a plan."""
    found = []
    for field in ("forbid", "require"):
        names: tuple[str, ...] = tuple(getattr(variations.spec.ladder, field))
        for name in names:
            rest = tuple(other for other in names if other != name)
            if variations.feasible(ladder={field: rest}):
                now, needed = ", ".join(names), ", ".join(rest) or "nothing"
                reason = f"{name} left open, memc finds a plan that fits"
                found.append(Relaxation(input=f"ladder.{field}", now=now, needed=needed, reason=reason))
                break
        else:
            if len(names) > 1 and variations.feasible(ladder={field: ()}):
                reason = "none of them named, memc finds a plan that fits"
                found.append(Relaxation(input=f"ladder.{field}", now=", ".join(names), needed="nothing", reason=reason))
    return found
