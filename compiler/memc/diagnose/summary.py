"""The table of torch.cuda.memory_summary(): what the allocator holds, and what it cannot give back."""

from __future__ import annotations

import re

from memc.diagnose.records import Cause, Evidence, Finding
from memc.diagnose.remedies import remedies
from memc.ledger.entries import Account, Resource
from memc.units import GIB, KIB, MIB, format_gib

_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB, "KB": KIB, "MB": MIB, "GB": GIB}
_CELL = r"\s*(-?\d+) (B|[KMGT]i?B)\s*"
_ROW = re.compile(rf"^\W*(Allocated|Active|Requested|GPU reserved|Non-releasable) memory\s*\|{_CELL}\|{_CELL}\|")
_HEAD = re.compile(r"PyTorch CUDA memory summary, device ID (\d+)")
_RETRIES = re.compile(r"CUDA OOMs: (\d+)\s*\|\s*cudaMalloc retries: (\d+)")
_FRAGMENT_SHARE = 0.15
NEEDLE = b"PyTorch CUDA memory summary"


def summary_finding(lines: tuple[str, ...], numbers: tuple[int, ...]) -> Finding | None:
    """Returns what the last summary among `lines` says; None when there is none with its main rows."""
    figures: dict[str, int] = {}
    evidence: list[Evidence] = []
    ooms = retries = 0
    for number, line in zip(numbers, lines, strict=True):
        if _HEAD.search(line):
            figures, evidence = {}, []
        counts, row = _RETRIES.search(line), _ROW.match(line.lstrip("| "))
        if counts:
            ooms, retries = int(counts[1]), int(counts[2])
            evidence.append(Evidence(line=number, text=line.strip("| ")))
        elif row:
            name = row[1].lower().replace(" ", "_").replace("-", "_")
            figures[f"{name}_now"] = int(row[2]) * _UNITS[row[3]]
            figures[f"{name}_peak"] = int(row[4]) * _UNITS[row[5]]
            if row[1] in ("Allocated", "GPU reserved", "Non-releasable"):
                evidence.append(Evidence(line=number, text=line.strip("| ")))
    if not {"allocated_now", "gpu_reserved_now"} <= figures.keys():
        return None
    return _judged(figures, evidence, ooms, retries)


def _judged(figures: dict[str, int], evidence: list[Evidence], ooms: int, retries: int) -> Finding:
    allocated, reserved = figures["allocated_now"], figures["gpu_reserved_now"]
    stuck = figures.get("non_releasable_now", 0)
    sentence = (
        f"{format_gib(allocated)} allocated (peak {format_gib(figures['allocated_peak'])}), {format_gib(reserved)} "
        f"reserved (peak {format_gib(figures['gpu_reserved_peak'])}), {format_gib(stuck)} of it cannot be given back; "
        f"{ooms} out-of-memory errors, {retries} retries"
    )
    if reserved and stuck > _FRAGMENT_SHARE * reserved:
        cause, account = Cause.FRAGMENTATION, Account.WORKSPACE
    elif ooms or retries:
        cause, account = Cause.ACTIVATIONS, Account.ACTIVATIONS
        sentence += "; the allocator is not fragmented, so what is allocated is simply too much"
    else:
        return _finding(Cause.IN_USE, None, sentence, figures, evidence)
    return _finding(cause, account, sentence, figures, evidence)


def _finding(
    cause: Cause, account: Account | None, sentence: str, figures: dict[str, int], evidence: list[Evidence]
) -> Finding:
    return Finding(
        kind="memory-summary",
        cause=cause,
        account=account,
        phase=None,
        resource=Resource.GPU,
        sentence=sentence,
        evidence=tuple(evidence[:6]),
        figures=figures,
        remedies=remedies(cause),
    )
