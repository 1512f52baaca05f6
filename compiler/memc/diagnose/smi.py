"""nvidia-smi: how full each card is, and who else is on it. The table, and --query-gpu / --query-compute-apps CSV."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

from memc.diagnose.records import Cause, Evidence, Finding
from memc.diagnose.remedies import remedies
from memc.ledger.entries import Account, Resource
from memc.units import MIB, format_gib

_GPU_LINE = re.compile(r"^\|\s*(\d+)\s+\S.*?\|\s*[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:")
_USE = re.compile(r"(\d+)MiB\s*/\s*(\d+)MiB")
_PROCESS = re.compile(
    r"^\|\s*(?P<gpu>\d+)\s+(?:\S+\s+\S+\s+)?(?P<pid>\d+)\s+(?P<kind>C|G|C\+G|M\+C)\s+(?P<name>.*?)\s+(?P<mib>\d+)MiB\s*\|"
)
_NUMBER = re.compile(r"\s*(\d+)(?: MiB)?\s*")
_HIDDEN_LEAST = 1024 * MIB
_FULL_SHARE = 0.9
NEEDLES = (b"NVIDIA-SMI", b"memory.used", b"used_gpu_memory", b"used_memory", b"MiB /")


@dataclass(frozen=True, kw_only=True)
class _Process:
    gpu: str
    pid: str
    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class _Card:
    used: int
    total: int


def smi_finding(lines: tuple[str, ...], numbers: tuple[int, ...]) -> Finding | None:
    """Returns what nvidia-smi's output says; None when the lines hold none."""
    cards: dict[str, _Card] = {}
    processes: list[_Process] = []
    shown: list[Evidence] = []
    gpu = ""
    header: list[str] = []
    for number, line in zip(numbers, lines, strict=True):
        before = len(cards) + len(processes)
        named, use, process = _GPU_LINE.match(line), _USE.search(line), _PROCESS.match(line)
        if named:
            gpu = named[1]
        if use and line.lstrip().startswith("|") and gpu:
            cards[gpu] = _Card(used=int(use[1]) * MIB, total=int(use[2]) * MIB)
        elif process:
            processes.append(
                _Process(gpu=process["gpu"], pid=process["pid"], name=process["name"], bytes=int(process["mib"]) * MIB)
            )
        elif "," in line:
            header = _csv_line(line, header, cards, processes)
        if len(cards) + len(processes) > before:
            shown.append(Evidence(line=number, text=line.strip()))
    return _judged(cards, processes, shown) if cards or processes else None


def _csv_line(line: str, header: list[str], cards: dict[str, _Card], processes: list[_Process]) -> list[str]:
    """Takes in one CSV line and returns the header that holds from there on."""
    cells = [cell.strip() for cell in next(csv.reader([line]))]
    names = [re.sub(r"\s*\[.*\]", "", cell) for cell in cells]
    if (
        {"memory.used", "memory.total"} <= set(names)
        or {"pid", "used_gpu_memory"} <= set(names)
        or ({"pid", "used_memory"} <= set(names))
    ):
        return names
    if not header or len(cells) != len(header):
        return header
    row = dict(zip(header, cells, strict=True))
    used, total = _mib(row.get("memory.used", "")), _mib(row.get("memory.total", ""))
    if used is not None and total is not None:
        cards[row.get("index", str(len(cards)))] = _Card(used=used, total=total)
    mine = _mib(row.get("used_gpu_memory", row.get("used_memory", "")))
    if mine is not None and "pid" in row:
        gpu = row.get("gpu_uuid", row.get("gpu_bus_id", ""))
        processes.append(_Process(gpu=gpu, pid=row["pid"], name=row.get("process_name", ""), bytes=mine))
    return header


def _mib(text: str) -> int | None:
    match = _NUMBER.fullmatch(text)
    return None if match is None else int(match[1]) * MIB


def _judged(cards: dict[str, _Card], processes: list[_Process], shown: list[Evidence]) -> Finding:
    by_gpu: dict[str, list[_Process]] = {}
    for process in processes:
        by_gpu.setdefault(process.gpu, []).append(process)
    shared = {gpu: found for gpu, found in by_gpu.items() if sum(p.bytes > 64 * MIB for p in found) > 1}
    figures = {f"gpu_{gpu}_used": card.used for gpu, card in cards.items()}
    figures |= {f"gpu_{gpu}_total": card.total for gpu, card in cards.items()}
    hidden = {
        gpu: card.used - sum(p.bytes for p in by_gpu.get(gpu, []))
        for gpu, card in cards.items()
        if processes or card.used > _FULL_SHARE * card.total
    }
    if shared:
        gpu, found = max(shared.items(), key=lambda item: sum(p.bytes for p in item[1]))
        listed = ", ".join(f"{p.pid} {p.name} {format_gib(p.bytes)}" for p in sorted(found, key=lambda p: -p.bytes)[:4])
        cause, sentence = Cause.OTHER_PROCESS, f"{len(found)} processes share GPU {gpu}: {listed}"
    elif processes and hidden and max(hidden.values()) > _HIDDEN_LEAST:
        gpu = max(hidden, key=lambda key: hidden[key])
        sentence = f"{format_gib(hidden[gpu])} on GPU {gpu} belong to no listed process (another container, or one that"
        cause, sentence = Cause.OTHER_PROCESS, sentence + " ended badly)"
    else:
        use = ", ".join(f"GPU {g}: {format_gib(c.used)} of {format_gib(c.total)}" for g, c in list(cards.items())[:8])
        single = ", ".join(f"{p.pid} {p.name} {format_gib(p.bytes)}" for p in processes[:4])
        full = [gpu for gpu, card in cards.items() if card.used > _FULL_SHARE * card.total]
        cause = Cause.IN_USE
        sentence = f"{use or single}; {'nearly full' if full else 'no process shares a card'}"
    return Finding(
        kind="nvidia-smi",
        cause=cause,
        account=Account.WORKSPACE if cause is Cause.OTHER_PROCESS else None,
        phase=None,
        resource=Resource.GPU,
        sentence=sentence,
        evidence=tuple(shown[:8]),
        figures=figures,
        remedies=remedies(cause),
    )
