"""A memory snapshot of torch.cuda.memory: every live block with the frames that allocated it, summed by account."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from memc.diagnose.pickles import plain_value
from memc.diagnose.records import Cause, Evidence, Finding
from memc.diagnose.remedies import remedies
from memc.errors import MemcError, usage_error
from memc.ledger.entries import Account, Phase, Resource
from memc.units import MIB, format_gib

MAX_VISITS = 5_000_000
_FRAGMENT_SHARE = 0.15
_SHOWN_FRAMES = 5
_NO_FRAMES: list[Any] = []  # one object: places are remembered by identity
_LIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")

# (file, function, account), first match over all frames of a block wins; saving and steps run others inside.
_RULES: tuple[tuple[str, str, Account], ...] = (
    (r"deepspeed/.*zero", r".*(ipg|bucket|flatten_dense|contiguous_grad).*", Account.WORKSPACE),
    (r"deepspeed/.*zero", r".*(fp32_groups|fp32_partition|float32).*", Account.MASTER_WEIGHTS),
    (r"deepspeed/.*zero", r"initialize_optimizer_states", Account.OPTIMIZER_STATES),
    (r"deepspeed/.*(partition_parameters|partitioned_param)", r".*", Account.PARAMETERS),
    (r"(torch|bitsandbytes|deepspeed/ops)/optim|deepspeed/ops/adam", r".*", Account.OPTIMIZER_STATES),
    (r"", r".*AccumulateGrad.*", Account.GRADIENTS),
    (r"torch/(autograd|_tensor)|deepspeed|accelerate", r"backward|_engine_run_backward", Account.GRADIENTS),
    (r"", r".*(Engine::evaluate_function|thread_main).*", Account.GRADIENTS),
    (r"", r"from_pretrained|_load_.*state_dict.*|_materialize_copy|load_state_dict", Account.PARAMETERS),
    (r"torch/nn/modules/module", r"_apply|convert|to|cuda", Account.PARAMETERS),
    (r"torch/nn/(modules|parameter)", r"__init__|reset_parameters", Account.PARAMETERS),
    (r"", r"forward|_call_impl|_wrapped_call_impl", Account.ACTIVATIONS),
)
_COMPILED = tuple((re.compile(file), re.compile(name), account) for file, name, account in _RULES)
_PHASE_OF = {
    Account.PARAMETERS: Phase.LOAD,
    Account.MASTER_WEIGHTS: Phase.LOAD,
    Account.GRADIENTS: Phase.BACKWARD,
    Account.OPTIMIZER_STATES: Phase.STEP,
    Account.ACTIVATIONS: Phase.FORWARD,
    Account.WORKSPACE: Phase.BACKWARD,
}


class _Sums:
    """What adds up while the blocks are visited; refuses a snapshot whose references make it endless."""

    def __init__(self) -> None:
        self.accounts: Counter[str] = Counter()
        self.frames: Counter[str] = Counter()
        self.reserved = self.live = self.idle = self.visits = 0

    def visit(self, size: int) -> None:
        self.visits += size
        if self.visits > MAX_VISITS:
            raise usage_error("pickle-too-large", f"the snapshot has more than {MAX_VISITS:,} frames and blocks")


def snapshot_finding(data: bytes) -> Finding:
    """Returns what a snapshot says.

    Raises:
        MemcError: When the file is no plain pickle, or no snapshot.
    """
    snapshot = plain_value(data)
    segments = snapshot.get("segments") if isinstance(snapshot, dict) else snapshot
    if not isinstance(segments, list):
        raise no_snapshot("it has no list of segments")
    sums = _Sums()
    seen: dict[int, tuple[str, str]] = {}
    for segment in records(segments):
        sums.visit(1)
        sums.reserved += _int(segment, "total_size")
        for block in records(segment.get("blocks")):
            _add(block, sums, seen)
    if not sums.reserved:
        raise no_snapshot("no memory was reserved on any card when it was taken")
    failure = _last_oom(snapshot, sums)
    return _judged(sums, failure)


def _add(block: dict[str, Any], sums: _Sums, seen: dict[int, tuple[str, str]]) -> None:
    """Adds one block to the sums."""
    sums.visit(1)
    size = _int(block, "size")
    if block.get("state") not in _LIVE:
        sums.idle += size
        return
    frames = block.get("frames")
    if not isinstance(frames, list):  # before torch 2.1 the frames hang below the block's history
        history = records(block.get("history"))
        frames = next((entry["frames"] for entry in history if isinstance(entry.get("frames"), list)), _NO_FRAMES)
    place = seen.get(id(frames))
    if place is None:
        sums.visit(len(frames))
        place = seen[id(frames)] = attributed(list(records(frames)))
    sums.live += size
    sums.accounts[place[0]] += size
    sums.frames[place[1]] += size


def attributed(frames: list[dict[str, Any]]) -> tuple[str, str]:
    """Returns account and allocating frame of a block, as text; `unattributed` when no frame tells."""
    named = [(str(f.get("filename", "")).replace("\\", "/"), str(f.get("name", "")), f.get("line", 0)) for f in frames]
    outside = next(
        (f for f in named if f[0].endswith(".py") and "/torch/" not in f"/{f[0]}"), named[0] if named else None
    )
    shown = "no frames were recorded" if outside is None else f"{outside[0]}:{outside[2]} {outside[1]}"
    for file, name, account in _COMPILED:
        if any(file.search(f[0]) and name.fullmatch(f[1]) for f in named):
            return account.value, shown
    return "unattributed", shown


def _last_oom(snapshot: Any, sums: _Sums) -> int | None:
    """Returns the bytes that the last failed allocation asked for; None when the trace shows no failure."""
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    found = None
    for trace in traces if isinstance(traces, list) else []:
        for entry in records(trace):
            sums.visit(1)
            if entry.get("action") == "oom":
                found = _int(entry, "size")
    return found


def _judged(sums: _Sums, failure: int | None) -> Finding:
    figures = {"reserved": sums.reserved, "allocated": sums.live, "idle": sums.idle}
    figures |= {str(name): size for name, size in sums.accounts.items()}
    known = [(size, Account(name)) for name, size in sums.accounts.items() if name != "unattributed"]
    account = max(known)[1] if known else None
    asked = f"an allocation of {format_gib(failure)} failed; " if failure is not None else ""
    parts = ", ".join(f"{name} {format_gib(size)}" for name, size in sums.accounts.most_common())
    sentence = (
        f"{asked}{format_gib(sums.reserved)} reserved, {format_gib(sums.live)} of it in use: {parts or 'nothing'}"
    )
    if sums.idle > max(256 * MIB, _FRAGMENT_SHARE * sums.reserved) and (failure is None or sums.idle >= failure):
        cause, account = Cause.FRAGMENTATION, Account.WORKSPACE
        sentence += f"; {format_gib(sums.idle)} are idle between blocks in use"
    elif failure is None and account is None:
        cause = Cause.IN_USE
    else:
        cause = _CAUSES.get(account, Cause.ACTIVATIONS) if account is not None else Cause.ACTIVATIONS
    return Finding(
        kind="memory-snapshot",
        cause=cause,
        account=account,
        phase=_PHASE_OF.get(account) if account is not None else None,
        resource=Resource.GPU,
        sentence=sentence,
        evidence=tuple(
            Evidence(line=0, text=_printable(f"{format_gib(size)}  {frame}"))
            for frame, size in sums.frames.most_common(_SHOWN_FRAMES)
        ),
        figures=figures,
        remedies=remedies(cause),
    )


_CAUSES = {
    Account.PARAMETERS: Cause.STATIC,
    Account.MASTER_WEIGHTS: Cause.MASTERS,
    Account.GRADIENTS: Cause.BACKWARD,
    Account.OPTIMIZER_STATES: Cause.FIRST_STEP,
    Account.ACTIVATIONS: Cause.ACTIVATIONS,
    Account.WORKSPACE: Cause.BUCKETS,
}


def records(value: Any) -> Iterator[dict[str, Any]]:
    """Returns the dicts of a list; none of anything else."""
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list | tuple) else iter(())


def _int(record: dict[str, Any], name: str) -> int:
    value = record.get(name, 0)
    return value if isinstance(value, int) and 0 <= value < 1 << 60 else 0


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:240]


def no_snapshot(why: str) -> MemcError:
    """Returns the refusal of a pickle that is something else."""
    return usage_error(
        "no-snapshot",
        f"the pickle is no memory snapshot: {why}",
        hint="record with torch.cuda.memory._record_memory_history() and write with torch.cuda.memory._dump_snapshot()",
    )
