"""From an out-of-memory message and what the run was doing to the likely cause."""

from __future__ import annotations

from dataclasses import dataclass

from memc.diagnose.excerpts import Excerpt
from memc.diagnose.phases import Doing, doing
from memc.diagnose.records import Cause, Evidence, Finding
from memc.diagnose.remedies import remedies
from memc.diagnose.torch_message import TorchMessage
from memc.ledger.entries import Account, Phase, Resource
from memc.units import GIB, MIB, format_gib

_OTHERS_SHARE = 20
_FRAGMENT_SHARE = 25
_OTHERS_LEAST = GIB
_CONTEXT_LEAST = 3 * GIB // 2
_LARGE_SHARE = 8


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    cause: Cause
    account: Account | None
    why: str


def judge_message(message: TorchMessage, excerpt: Excerpt) -> Finding:
    """Returns the finding on one message of torch."""
    run = doing(excerpt.before())
    verdict = _outside(message) or _by_shape(message, run) or _by_phase(message, run)
    quoted = [excerpt.at] if run.frame is None else [run.frame.at, run.frame.at + 1, excerpt.at]
    lines = dict.fromkeys(index for index in quoted if index < len(excerpt.lines) and excerpt.lines[index].strip())
    where = f" on GPU {message.gpu}" if message.gpu is not None else ""
    tried = message.sizes.get("tried")
    asked = f"{format_gib(tried)} could not be allocated{where}" if tried is not None else f"memory ran out{where}"
    done = "" if run.steps is None else f", after {run.steps:,} steps" if run.steps else ", before the first step ended"
    return Finding(
        kind="torch-out-of-memory",
        cause=verdict.cause,
        account=verdict.account,
        phase=run.phase,
        resource=Resource.GPU,
        sentence=f"{asked}{done}: {verdict.why}",
        evidence=tuple(Evidence(line=number, text=text) for number, text in map(excerpt.quote, lines)),
        figures={**message.sizes, "other_processes": message.others_bytes},
        remedies=remedies(verdict.cause),
    )


def _outside(message: TorchMessage) -> _Verdict | None:
    """Returns the verdict when something other than the run's tensors took the memory."""
    sizes = message.sizes
    capacity = sizes.get("capacity", 0)
    if "allowed" in sizes and sizes["allowed"] < capacity:
        limit, whole = format_gib(sizes["allowed"]), format_gib(capacity)
        return _Verdict(cause=Cause.ALLOCATOR_LIMIT, account=None, why=f"the allocator may use {limit} of {whole}")
    if message.others_bytes > max(_OTHERS_LEAST, capacity // _OTHERS_SHARE):
        others, whole = format_gib(message.others_bytes), format_gib(capacity)
        return _Verdict(
            cause=Cause.OTHER_PROCESS, account=None, why=f"other processes hold {others} of the card's {whole}"
        )
    if {"capacity", "free", "reserved"} <= sizes.keys() and "this_process" not in sizes:
        unseen = capacity - sizes["free"] - sizes["reserved"]
        if unseen > max(_CONTEXT_LEAST, capacity // _OTHERS_SHARE):
            text = f"{format_gib(unseen)} of the card's {format_gib(capacity)} lie outside this process's allocator"
            return _Verdict(cause=Cause.OTHER_PROCESS, account=None, why=text)
    return None


def _by_shape(message: TorchMessage, run: Doing) -> _Verdict | None:
    """Returns the verdict that the sizes alone give: fragments, or one very large tensor."""
    sizes = message.sizes
    tried, unallocated, capacity = sizes.get("tried", 0), sizes.get("unallocated", 0), sizes.get("capacity", 0)
    if tried and unallocated >= max(256 * MIB, capacity // _FRAGMENT_SHARE):
        free = sizes.get("free", 0)
        if unallocated + free >= tried:
            text = (
                f"{format_gib(unallocated)} are reserved but unallocated, in pieces; together with {format_gib(free)} "
                "free they would have been enough"
            )
            return _Verdict(cause=Cause.FRAGMENTATION, account=Account.WORKSPACE, why=text)
    large = capacity and tried > capacity // _LARGE_SHARE
    if large and run.phase in (Phase.FORWARD, None) and run.cause is not Cause.KV_CACHE:
        text = f"one tensor of {format_gib(tried)} is {tried / capacity:.0%} of the card, as a long sample makes it"
        return _Verdict(cause=Cause.LONG_SAMPLE, account=Account.ACTIVATIONS, why=text)
    return None


def _by_phase(message: TorchMessage, run: Doing) -> _Verdict:
    """Returns the verdict that the phase gives."""
    if run.cause is None:
        if "tried" not in message.sizes:
            text = "a call outside torch's allocator failed, as when a context is created on a full card"
            return _Verdict(cause=Cause.CONTEXT, account=Account.WORKSPACE, why=text)
        text = "no traceback tells what the run was doing"
        started = run.steps is not None and run.steps > 0
        return _Verdict(
            cause=Cause.GROWTH if started else Cause.STATIC,
            account=Account.ACTIVATIONS if started else Account.PARAMETERS,
            why=text + ("; it had trained before, so what varies grew" if started else ", nor that it had trained yet"),
        )
    if run.cause is Cause.FIRST_STEP and run.steps is not None and run.steps > 1:
        text = "the optimizer's own buffers no longer fit beside what grew since the first step"
        return _Verdict(cause=Cause.GROWTH, account=Account.OPTIMIZER_STATES, why=text)
    if run.steps is not None and run.steps >= 2 and run.cause in (Cause.ACTIVATIONS, Cause.BACKWARD):
        text = f"{run.steps:,} steps had fitted, so this batch was longer than those, or something is kept over steps"
        return _Verdict(cause=Cause.GROWTH, account=Account.ACTIVATIONS, why=text)
    return _Verdict(cause=run.cause, account=run.account, why=_held(message, run))


def _held(message: TorchMessage, run: Doing) -> str:
    """Returns what torch held then, and in which phase."""
    sizes = message.sizes
    if {"allocated", "capacity"} <= sizes.keys():
        held = f"{format_gib(sizes['allocated'])} of the card's {format_gib(sizes['capacity'])} were in tensors"
        return f"{held}, in phase {run.phase}"
    return f"in phase {run.phase}"
