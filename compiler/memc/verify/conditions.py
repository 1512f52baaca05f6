"""What about the machine bears on a measurement: others on the card, slices, error correction, another card."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memc.errors import Diagnostic
from memc.units import MIB, format_gib
from memc.verify.cards import Card, cards_here, is_wsl
from memc.verify.lock import Promise
from memc.verify.probe import RankReport

BUSY_SHARE = 0.1
OTHERS_LEAST_BYTES = 64 * MIB
CAPACITY_SHARE = 0.01
_SHOWN_PROCESSES = 4
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "NCCL_BUFFSIZE",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
)
"""What the environment may say to torch, CUDA and NCCL that moves memory or time, and that no plan knows.

Source: torch 2.13.0, torch/backends/cuda, torch/nn/parallel/distributed.py, torch/utils/collect_env.py and the names in
libc10_cuda and libtorch_cuda.
"""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The machine before the run.

    Attributes:
        cards: Those that the run uses, as far as nvidia-smi tells; empty on a CPU.
        wsl: Whether Linux runs under Windows.
        variables: Of `VARIABLES` those that are set, with their values.
    """

    cards: tuple[Card, ...] = ()
    wsl: bool = False
    variables: tuple[tuple[str, str], ...] = ()

    def document(self) -> dict[str, Any]:
        """Returns what the lock keeps."""
        cards = [card.condition() for card in self.cards]
        return {"cards": cards, "variables": dict(self.variables), "wsl": self.wsl}

    def card_of(self, report: RankReport) -> Card | None:
        """Returns the card that a rank ran on; None when it cannot be told, as on a slice."""
        if not report.device_uuid:
            return None
        return next((card for card in self.cards if report.device_uuid in card.uuid), None)

    def others_bytes(self, report: RankReport) -> int:
        """Returns what others held on a rank's card before the run; 0 when unknown."""
        card = self.card_of(report)
        return 0 if card is None or card.mig else card.used_bytes or 0


def conditions_here(count: int) -> Conditions:
    """Returns the conditions for a run on the first `count` cards that are visible."""
    return Conditions(cards=cards_here()[:count], wsl=is_wsl(), variables=variables_here())


def variables_here() -> tuple[tuple[str, str], ...]:
    """Returns what this environment says that bears on memory or time."""
    return tuple((name, os.environ[name]) for name in VARIABLES if os.environ.get(name))


def busy_card(promise: Promise, conditions: Conditions) -> Diagnostic | None:
    """Returns the refusal when others leave too little of a card for what the plan needs; None when none is so full."""
    for card in conditions.cards:
        free = card.free_bytes
        if card.mig or free is None or free >= promise.required_bytes:
            continue
        return Diagnostic(
            code="card-busy",
            message=f"GPU {card.index} ({card.name}) has {format_gib(free)} free, and the plan needs "
            f"{format_gib(promise.required_bytes)}: {format_gib(card.used_bytes or 0)} of it are taken already",
            context=process_lines(card),
            hint="end what uses it, or choose other cards with CUDA_VISIBLE_DEVICES; --device cuda measures anyway",
        )
    return None


def process_lines(card: Card) -> tuple[str, ...]:
    """Returns the processes on a card, one a line, largest first."""
    largest = sorted(card.processes, key=lambda process: -(process.bytes or 0))[:_SHOWN_PROCESSES]
    return tuple(
        f"{process.pid} {process.name}" + (f" {format_gib(process.bytes)}" if process.bytes is not None else "")
        for process in largest
    )


def notes(promise: Promise, conditions: Conditions, reports: tuple[RankReport, ...]) -> tuple[str, ...]:
    """Returns what a reader of the measurement must know of the machine, as sentences."""
    return tuple(dict.fromkeys([*_of_cards(conditions), *_of_ranks(promise, reports)]))


def _of_cards(conditions: Conditions) -> Iterator[str]:
    for card in conditions.cards:
        used = card.used_bytes or 0
        if used >= OTHERS_LEAST_BYTES and not card.mig:
            who = ", ".join(process_lines(card)) or "no process is listed"
            yield f"GPU {card.index} was not free: {format_gib(used)} were taken before the run ({who})"
        if card.utilization is not None and card.utilization >= BUSY_SHARE:
            yield f"GPU {card.index} was computing before the run ({card.utilization:.0%}): times say little"
        if card.mig:
            yield f"GPU {card.index} is cut into slices (MIG): a rank sees one of them"
        if card.uncorrected_errors:
            yield f"GPU {card.index} counts {card.uncorrected_errors} uncorrected memory errors (nvidia-smi -q -d ECC)"
    if conditions.variables:
        said = ", ".join(f"{name}={value}" for name, value in conditions.variables)
        yield f"the environment sets what no plan knows, and memory or time may differ for it: {said}"
    if conditions.wsl:
        yield "Linux runs under Windows (WSL), whose desktop uses the card too, and the driver lists no processes"


def _of_ranks(promise: Promise, reports: tuple[RankReport, ...]) -> Iterator[str]:
    for report in reports:
        if report.capacity_bytes is None or promise.capacity_bytes is None:
            continue
        differs = report.capacity_bytes - promise.capacity_bytes
        if abs(differs) > CAPACITY_SHARE * promise.capacity_bytes:
            less = "less" if differs < 0 else "more"
            yield (
                f"{report.device_name} has {format_gib(report.capacity_bytes)}, {format_gib(abs(differs))} {less} than "
                f"the planned {promise.gpu_name or 'card'}; it is judged by the plan's budget"
            )
        elif promise.gpu_name and report.device_name and not _same_card(report.device_name, promise.gpu_name):
            yield f"measured on {report.device_name}, planned for {promise.gpu_name}"
        if report.settled is False:
            yield f"rank {report.rank}: reserved memory still grew at step {len(report.reserved_bytes_by_step)}"
        if report.allocator_settings not in ("", "expandable_segments:True"):
            yield f"torch's allocator was set to {report.allocator_settings}"


def _same_card(measured: str, planned: str) -> bool:
    """Whether one name holds all the words of the other, as drivers and catalogues differ in what they add."""
    ours, theirs = (frozenset(name.lower().replace("-", " ").split()) for name in (planned, measured))
    return ours <= theirs or theirs <= ours
