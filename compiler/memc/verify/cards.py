"""The cards of this machine as nvidia-smi describes them: who else is on them, slices, error correction.

nvidia-smi comes with the driver and needs no package. It lists no single process under WSL or from inside a container,
so what a card holds is read from the card.
"""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from memc.units import MIB

_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)
_APPS = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
_SECONDS = 20.0
_KERNEL = Path("/proc/sys/kernel/osrelease")


@dataclass(frozen=True, kw_only=True)
class CardProcess:
    """A process on a card.

    Attributes:
        pid: Its number.
        name: Its program.
        bytes: What it holds; None where the driver does not say.
    """

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card before the run.

    Attributes:
        index: Its number at nvidia-smi.
        uuid: With its prefix.
        name: As the driver names it.
        total_bytes: Its memory.
        used_bytes: What is taken, by whomever; None when unknown.
        utilization: Share of the last moments in which it computed, 0 to 1; None when unknown.
        mig: Whether it is cut into slices.
        ecc: Whether error correction is on; None where the card has none.
        uncorrected_errors: Since the driver was loaded; 0 when unknown.
        processes: On it, as far as they are seen from here.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int | None
    utilization: float | None
    mig: bool
    ecc: bool | None
    uncorrected_errors: int
    processes: tuple[CardProcess, ...] = ()

    @property
    def free_bytes(self) -> int | None:
        """What is left of it; None when unknown."""
        return None if self.used_bytes is None else self.total_bytes - self.used_bytes

    def condition(self) -> dict[str, object]:
        """Returns what the lock keeps of it: no number that tells one card from another."""
        return {
            "name": self.name,
            "total_bytes": self.total_bytes,
            "used_before_bytes": self.used_bytes,
            "processes_before": len(self.processes),
            "mig": self.mig,
            "ecc": self.ecc,
            "uncorrected_errors": self.uncorrected_errors,
        }


def cards_here(environment: Mapping[str, str] | None = None) -> tuple[Card, ...]:
    """Returns the cards that a process started with `environment` would see; none when nvidia-smi does not answer."""
    rows = _query("--query-gpu", _FIELDS)
    by_card: dict[str, list[CardProcess]] = {}
    for uuid, pid, name, used in _query("--query-compute-apps", _APPS) if rows else ():
        if pid.isdecimal():
            found = CardProcess(pid=int(pid), name=Path(name).name or name, bytes=_mib(used))
            by_card.setdefault(uuid, []).append(found)
    cards = [_card(row, tuple(by_card.get(row[1], ()))) for row in rows if row[0].isdecimal() and _mib(row[3])]
    return tuple(_visible(cards, (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")))


def is_wsl(release: Path = _KERNEL) -> bool:
    """Returns whether this Linux runs under Windows, whose kernel names its maker in its release."""
    try:
        return "microsoft" in release.read_text(encoding="utf-8").lower()
    except OSError:
        return False


def _query(what: str, fields: tuple[str, ...]) -> list[list[str]]:
    """Returns the rows of one question to nvidia-smi; none when it is not there, fails or hangs."""
    command = ["nvidia-smi", f"{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())]
    return [row for row in rows if len(row) == len(fields)]


def _card(row: list[str], processes: tuple[CardProcess, ...]) -> Card:
    index, uuid, name, total, used, busy, mig, ecc, errors = row
    return Card(
        index=int(index),
        uuid=uuid,
        name=name,
        total_bytes=_mib(total) or 0,
        used_bytes=_mib(used),
        utilization=int(busy) / 100 if busy.isdecimal() else None,
        mig=mig == "Enabled",
        ecc={"Enabled": True, "Disabled": False}.get(ecc),
        uncorrected_errors=int(errors) if errors.isdecimal() else 0,
        processes=processes,
    )


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdecimal() else None


def _visible(cards: list[Card], chosen: str | None) -> Iterable[Card]:
    """Yields the cards that CUDA_VISIBLE_DEVICES leaves, in its order; a slice stands for nothing that can be asked."""
    if chosen is None:
        yield from cards
        return
    for name in (part.strip() for part in chosen.split(",")):
        if name.isdecimal():
            found = next((card for card in cards if card.index == int(name)), None)
        else:
            found = next((card for card in cards if name and card.uuid.startswith(name)), None)
        if found is None:
            return
        yield found
