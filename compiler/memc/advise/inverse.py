"""The inverse questions: the longest, the largest, the smallest value of one field that still has a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from memc.advise.attempt import Attempt, Shortfall, Stopper, Summary
from memc.advise.desk import Desk
from memc.advise.variations import with_card, with_count, with_length, with_micro_batch, with_model
from memc.errors import usage_error
from memc.facts import GpuFacts, gpu_rows, load_gpu, load_model, model_rows
from memc.spec import Spec

LENGTH_STEP = 64
_LONGEST = 2**24
_COUNTS = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8))


class Quantity(StrEnum):
    """What can be solved for."""

    MAX_LENGTH = "max_length"
    MICRO_BATCH_SIZE = "micro_batch_size"
    MODEL = "model"
    GPU = "gpu"
    COUNT = "count"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A value and what became of it: a plan, or what stopped it; `size` orders the values, for display."""

    value: int | str
    size: float | None = None
    plan: Summary | None = None
    shortfall: Shortfall | None = None


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The answer to an inverse question.

    Attributes:
        quantity: What was asked for.
        answer: The value with its plan; None when nothing fits.
        fails: The next value beyond the answer, which has no plan; None when every value tried fits. Without an answer,
            the value that comes nearest.
        limit: What ends the search, as a sentence.
        tried: Every value of a list that was tried (models, cards, counts), in its order; empty for a number that was
            searched for.
        notes: What was changed or assumed.
    """

    quantity: Quantity
    answer: Tried | None
    fails: Tried | None
    limit: str
    tried: tuple[Tried, ...] = ()
    notes: tuple[str, ...] = ()


def solve_for(desk: Desk, quantity: Quantity) -> Solution:
    """Returns the answer to one inverse question.

    Raises:
        MemcError: When the spec contradicts the facts whatever the value.
    """
    answers: dict[Quantity, Callable[[Desk], Solution]] = {
        Quantity.MAX_LENGTH: longest_sequence,
        Quantity.MICRO_BATCH_SIZE: largest_micro_batch,
        Quantity.MODEL: largest_model,
        Quantity.GPU: cheapest_card,
        Quantity.COUNT: fewest_cards,
    }
    return answers[quantity](desk)


def longest_sequence(desk: Desk) -> Solution:
    """Returns the longest `data.max_length` with a plan: a multiple of 64, or all positions of the model.

    Memory only grows with the length. Time need not (packed samples make fewer sequences), so lengths that double are
    tried first, and the gap above the longest of them that has a plan is halved until it is one step wide.
    """
    positions = desk.model.max_position_embeddings
    bound = positions or _LONGEST
    steps = bound // LENGTH_STEP

    def tried(step: int) -> Tried:
        length = min(step * LENGTH_STEP, bound) if step <= steps else bound
        return _tried(length, desk.attempt(with_length(desk.spec, length)))

    last = steps if bound % LENGTH_STEP == 0 else steps + 1
    probes = sorted({min(2**power, last) for power in range(last.bit_length() + 1)})
    found: dict[int, Tried] = {}
    for step in reversed(probes):
        found[step] = tried(step)
        if found[step].plan is not None:
            break
    low = min(found)
    if found[low].plan is None:
        return Solution(quantity=Quantity.MAX_LENGTH, answer=None, fails=found[low], limit=_limit(found[low]))
    high = min((step for step in found if step > low), default=last + 1)
    while high - low > 1:
        middle = (low + high) // 2
        found[middle] = tried(middle)
        low, high = (middle, high) if found[middle].plan is not None else (low, middle)
    if low == last:
        limit = f"{desk.model.key} has {bound} positions" if positions else f"a spec goes up to {bound} tokens"
        return Solution(quantity=Quantity.MAX_LENGTH, answer=found[low], fails=None, limit=limit)
    return Solution(quantity=Quantity.MAX_LENGTH, answer=found[low], fails=found[high], limit=_limit(found[high]))


def largest_micro_batch(desk: Desk) -> Solution:
    """Returns the largest micro-batch with a plan, among those that divide the samples of one GPU in a step."""
    spec = desk.spec
    per_rank = spec.training.global_batch_size // spec.world_size
    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    fails: Tried | None = None
    notes: tuple[str, ...] = ()
    if spec.pin.gradient_accumulation_steps is not None:
        notes = ("pin.gradient_accumulation_steps is left out: accumulation follows from the micro-batch",)
    for size in reversed(sizes):
        now = _tried(size, desk.attempt(with_micro_batch(spec, size)))
        if now.plan is None:
            fails = now
            continue
        limit = (
            f"global_batch_size {spec.training.global_batch_size} is {per_rank} samples for each of "
            f"{spec.world_size} GPUs: there is no larger micro-batch"
            if fails is None
            else _limit(fails)
        )
        return Solution(quantity=Quantity.MICRO_BATCH_SIZE, answer=now, fails=fails, limit=limit, notes=notes)
    assert fails is not None
    return Solution(quantity=Quantity.MICRO_BATCH_SIZE, answer=None, fails=fails, limit=_limit(fails), notes=notes)


def largest_model(desk: Desk) -> Solution:
    """Returns the largest model of the spec's family in the catalogue with a plan, and the next larger one."""
    family = desk.model.model_type
    rows = sorted((row.params, row.key) for row in model_rows() if row.model_type == family and row.priced)
    tried: list[Tried] = []
    for params, key in rows:
        model = load_model(key, base_dir=Path())
        outcome = desk.attempt_or_why_not(with_model(desk.spec, key), model=model)
        tried.append(_tried(key, outcome, size=float(params)))
    notes = (f"models of type {family} in the catalogue, by parameters",)
    return _largest(desk, Quantity.MODEL, tried, notes)


def _largest(desk: Desk, quantity: Quantity, tried: list[Tried], notes: tuple[str, ...]) -> Solution:
    """Returns the last value with a plan of an ascending list, and the first after it."""
    _require_one(desk, quantity, tried)
    fitting = [index for index, item in enumerate(tried) if item.plan is not None]
    answer = tried[fitting[-1]] if fitting else None
    rest = tried[fitting[-1] + 1 :] if fitting else tried
    fails = next((item for item in rest if _is_short(item)), next(iter(rest), None))
    limit = "the catalogue has no larger one" if fails is None else _limit(fails)
    return Solution(quantity=quantity, answer=answer, fails=fails, limit=limit, tried=tuple(tried), notes=notes)


def cheapest_card(desk: Desk) -> Solution:
    """Returns the cheapest card with a plan, by price of an hour and then by capacity; unpriced cards come last."""
    tried: list[Tried] = []
    for facts in _by_price(desk, (desk.card(row.facts) for row in gpu_rows())):
        outcome = desk.attempt_or_why_not(own_or_other_card(desk, facts), gpu=facts)
        tried.append(_tried(facts.key, outcome, size=_hour_price(desk, facts)))
    notes = ["cards by price of one hour, then by capacity; cards whose price is unknown come last"]
    if desk.spec.memory.target is not None:
        notes.append(f"memory.target holds for {desk.gpu.key} alone: of other cards, all but the reserve may be used")
    smallest = min(
        (load_gpu(str(item.value)) for item in tried if item.plan is not None),
        key=lambda facts: facts.capacity_bytes or 0,
        default=None,
    )
    if smallest is not None:
        notes.append(f"the smallest card that fits: {smallest.key}, {(smallest.capacity_bytes or 0) / 2**30:.1f} GiB")
    return _first(desk, Quantity.GPU, tried, tuple(notes))


def own_or_other_card(desk: Desk, facts: GpuFacts, *, usd_per_gpu_hour: float | None = None) -> Spec:
    """Returns the spec with a card: the spec's own as it is, any other by `with_card`."""
    if facts.key != desk.gpu.key:
        return with_card(desk.spec, facts.key, usd_per_gpu_hour=usd_per_gpu_hour)
    if usd_per_gpu_hour is None:
        return desk.spec
    hardware = desk.spec.hardware.model_copy(update={"usd_per_gpu_hour": usd_per_gpu_hour})
    return desk.spec.model_copy(update={"hardware": hardware})


def _hour_price(desk: Desk, facts: GpuFacts) -> float | None:
    own = desk.spec.hardware.usd_per_gpu_hour
    return own if facts.key == desk.gpu.key and own is not None else facts.usd_per_hour


def _by_price(desk: Desk, cards: Iterable[GpuFacts]) -> list[GpuFacts]:
    def key(facts: GpuFacts) -> tuple[bool, float, int, str]:
        price = _hour_price(desk, facts)
        return price is None, price or 0.0, facts.capacity_bytes or 0, facts.key

    return sorted(cards, key=key)


def fewest_cards(desk: Desk) -> Solution:
    """Returns the fewest cards of the spec's kind with a plan, the global batch as it is; above 8, in nodes of 8."""
    tried = [
        _tried(
            count * nodes,
            desk.attempt_or_why_not(with_count(desk.spec, count, nodes)),
            size=float(count * nodes),
        )
        for count, nodes in _COUNTS
    ]
    note = f"{desk.gpu.key}, up to 8 in one node, then nodes of 8; the global batch stays as it is"
    return _first(desk, Quantity.COUNT, tried, (note,))


def _first(desk: Desk, quantity: Quantity, tried: list[Tried], notes: tuple[str, ...]) -> Solution:
    """Returns the first value with a plan of an ascending list, and of those before it the last that is short."""
    _require_one(desk, quantity, tried)
    index = next((index for index, item in enumerate(tried) if item.plan is not None), None)
    short = [item for item in (tried if index is None else tried[:index]) if _is_short(item)]
    fails = None
    if short:
        nearest = min(short, key=lambda item: item.shortfall.bytes if item.shortfall else 0)
        fails = nearest if quantity is Quantity.GPU else short[-1]
    answer = None if index is None else tried[index]
    limit = "it is the first of the list" if fails is None else _limit(fails)
    return Solution(quantity=quantity, answer=answer, fails=fails, limit=limit, tried=tuple(tried), notes=notes)


def _tried(value: int | str, outcome: Attempt | Shortfall, *, size: float | None = None) -> Tried:
    if isinstance(outcome, Shortfall):
        return Tried(value=value, size=size, shortfall=outcome)
    return Tried(value=value, size=size, plan=outcome.summary(), shortfall=outcome.shortfall())


def _is_short(item: Tried) -> bool:
    return item.shortfall is not None and item.shortfall.stopped_by is not Stopper.REFUSED


def _limit(item: Tried) -> str:
    return item.shortfall.sentence if item.shortfall is not None else ""


def _require_one(desk: Desk, quantity: Quantity, tried: list[Tried]) -> None:
    """Raises when not one value could be priced: the spec itself is then at fault.

    Raises:
        MemcError: What is wrong with the spec as it is; else ``nothing-to-try`` with the first reason.
    """
    if any(item.plan is not None or _is_short(item) for item in tried):
        return
    desk.attempt(desk.spec)
    reason = f": {_limit(tried[0])}" if tried else ""
    raise usage_error(
        "nothing-to-try",
        f"no {quantity} of the catalogue goes with this spec{reason}",
        hint="remove what stands in the way",
    )
