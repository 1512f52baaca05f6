"""Money: when an upgrade pays, and the three signals that it is time for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from memc.advise.attempt import Summary
from memc.ledger import Account, Ledger
from memc.ledger.entries import Moment, ResourceLedger
from memc.units import format_seconds

_STATES = (Account.PARAMETERS, Account.MASTER_WEIGHTS, Account.GRADIENTS, Account.OPTIMIZER_STATES)
HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the user says that things cost, in US dollars.

    Attributes:
        gpu_hour: One hour of one GPU, by card; the catalogue's where a card is missing.
        upgrade: One GPU, paid once, by card.
        any_upgrade: The same for every card that `upgrade` does not name; 0 where cards are rented by the hour.
        engineer_hour: One hour of the person who makes runs fit; None when not given.
        debug_hours: Hours that making the spec's own plan fit costs; None when not given.
        deadline: What missing `time.budget` costs; 0 when nothing.
    """

    gpu_hour: Mapping[str, float] = field(default_factory=dict)
    upgrade: Mapping[str, float] = field(default_factory=dict)
    any_upgrade: float = 0.0
    engineer_hour: float | None = None
    debug_hours: float | None = None
    deadline: float = 0.0

    @property
    def debugging_usd(self) -> float | None:
        """Engineer's hours at their price; None when either is unknown."""
        if self.engineer_hour is None or self.debug_hours is None:
            return None
        return self.engineer_hour * self.debug_hours

    def upgrade_usd(self, card: str, bought: int) -> float:
        """Returns the price of `bought` GPUs of a card."""
        return self.upgrade.get(card, self.any_upgrade) * bought


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """An upgrade against going on with the spec's own card.

    The upgrade's price stands against the time it saves, the debugging it avoids and the deadline it keeps.

    Attributes:
        upgrade_usd: Price of the GPUs to buy.
        hours_saved: Hours of the run; negative when it takes longer.
        time_usd: Money of the run that is saved; negative when the run costs more.
        debugging_usd: Debugging that is avoided: where the plan stands on a lower rung than the spec's own.
        deadline_usd: What missing the deadline costs, where this plan meets it and the spec's own does not.
        gain_usd: The three together.
        net_usd: Gain less the upgrade's price: above 0 it pays within this one run.
        ratio: The upgrade's price over the gain: below 1 it pays; None without a gain.
    """

    upgrade_usd: float
    hours_saved: float
    time_usd: float
    debugging_usd: float
    deadline_usd: float
    gain_usd: float
    net_usd: float
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A plan on another card or another number of cards, and how many GPUs it means to buy."""

    card: str
    bought: int
    plan: Summary


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One of the three signs that it is time for other hardware.

    Attributes:
        name: Kebab-case.
        raised: Whether it shows; None when what it needs is not known.
        sentence: Why, with the figures.
    """

    name: str
    raised: bool | None
    sentence: str


def break_even(own: Summary, offer: Offer, costs: Costs, deadline_seconds: float | None) -> BreakEven | None:
    """Returns what an upgrade costs and gains over one run; None when a run's length or price is unknown."""
    plan = offer.plan
    if own.total_seconds is None or plan.total_seconds is None or own.total_usd is None or plan.total_usd is None:
        return None
    time_usd = own.total_usd - plan.total_usd
    debugging = costs.debugging_usd or 0.0 if plan.rung < own.rung else 0.0
    keeps = deadline_seconds is not None and plan.total_seconds <= deadline_seconds < own.total_seconds
    deadline = costs.deadline if keeps else 0.0
    gain, price = time_usd + debugging + deadline, costs.upgrade_usd(offer.card, offer.bought)
    return BreakEven(
        upgrade_usd=price,
        hours_saved=(own.total_seconds - plan.total_seconds) / 3600,
        time_usd=time_usd,
        debugging_usd=debugging,
        deadline_usd=deadline,
        gain_usd=gain,
        net_usd=gain - price,
        ratio=price / gain if gain > 0 else None,
    )


def signals(
    own: Summary | None,
    ledger: Ledger | None,
    *,
    late: str | None,
    limited: bool,
    costs: Costs,
    offers: Sequence[Offer],
) -> tuple[Signal, ...]:
    """Returns the three signals for the spec's own plan.

    Args:
        own: The plan, whatever time it takes; None when nothing fits in memory.
        ledger: Its bill.
        late: Why it misses the budget of time or money, as a sentence; None when it meets it.
        limited: Whether the spec has such a budget.
        costs: The user's figures.
        offers: Plans on other hardware.
    """
    return (
        _beyond_sharding(own, late=late, limited=limited),
        _mostly_offloaded(own, ledger),
        _debugging_is_dearer(own, costs, offers),
    )


def _beyond_sharding(own: Summary | None, *, late: str | None, limited: bool) -> Signal:
    name = "beyond-sharding-and-too-slow"
    if own is None:
        sentence = "no rung makes it fit on the spec's own hardware: more memory, more cards or another method"
        return Signal(name=name, raised=True, sentence=sentence)
    if own.config.zero_stage < 3 and own.config.fsdp is None:
        sentence = f"the plan stops at rung {own.rung}, before parameters are sharded or offloaded"
        return Signal(name=name, raised=False, sentence=sentence)
    if not limited:
        sentence = "parameters are sharded or offloaded; time.budget is not given, so nothing says what is too slow"
        return Signal(name=name, raised=None, sentence=sentence)
    if late is None:
        sentence = "parameters are sharded or offloaded, and the run still meets time.budget"
        return Signal(name=name, raised=False, sentence=sentence)
    return Signal(name=name, raised=True, sentence=f"parameters are sharded or offloaded, and {late}")


def offloaded_share(ledger: Ledger, gpus_per_node: int) -> float:
    """Returns the share of weights, masters, gradients and moments that lies off the GPUs of a node.

    Source: the entries of these four accounts that are alive in the optimizer step, where all of them are.
    """
    gpu = _state_bytes(ledger.gpu) * gpus_per_node
    elsewhere = _state_bytes(ledger.host) + _state_bytes(ledger.nvme)
    return elsewhere / (gpu + elsewhere) if gpu + elsewhere else 0.0


def _state_bytes(bill: ResourceLedger) -> int:
    return sum(entry.bytes for entry in bill.entries if entry.account in _STATES and Moment.STEP in entry.moments)


def _mostly_offloaded(own: Summary | None, ledger: Ledger | None) -> Signal:
    name = "mostly-offloaded"
    if own is None or ledger is None:
        return Signal(name=name, raised=None, sentence="there is no plan whose states could lie anywhere")
    share = offloaded_share(ledger, own.config.gpus_per_node)
    where = "on the host" if share else "off the GPU"
    relation = "more than half: PCIe sets the pace" if share > HALF else "not more than half"
    return Signal(
        name=name, raised=share > HALF, sentence=f"{share:.0%} of weights, gradients and states lie {where}, {relation}"
    )


def _debugging_is_dearer(own: Summary | None, costs: Costs, offers: Sequence[Offer]) -> Signal:
    name = "debugging-dearer-than-upgrade"
    debugging = costs.debugging_usd
    if debugging is None:
        sentence = "give --engineer-hour and --debug-hours to compare debugging with an upgrade"
        return Signal(name=name, raised=None, sentence=sentence)
    if own is None:
        return Signal(name=name, raised=None, sentence="no debugging makes fit what no rung makes fit")
    dearer = [
        (costs.upgrade_usd(offer.card, offer.bought) + offer.plan.total_usd - own.total_usd, offer)
        for offer in offers
        if offer.plan.rung < own.rung and offer.plan.total_usd is not None and own.total_usd is not None
    ]
    if not dearer:
        sentence = "no hardware of the catalogue with a known price has a plan on a lower rung"
        return Signal(name=name, raised=False, sentence=sentence)
    difference, least = min(dearer, key=lambda item: (item[0], item[1].card))
    what = f"{least.plan.config.world_size} x {least.card}"
    change = f"costs ${difference:,.2f} more" if difference >= 0 else f"costs ${-difference:,.2f} less"
    sentence = f"debugging costs ${debugging:,.2f}; {what}, on rung {least.plan.rung} instead of {own.rung}, {change}"
    return Signal(name=name, raised=debugging > difference, sentence=sentence)


def run_length(plan: Summary) -> str:
    """Returns how long the run takes, for display; that of a step where the amount of data is unknown."""
    if plan.total_seconds is not None:
        return format_seconds(plan.total_seconds)
    return "time unknown" if plan.step_seconds is None else f"{format_seconds(plan.step_seconds)} per step"
