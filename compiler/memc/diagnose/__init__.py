"""Why a run ran out of memory: what its log, its allocator or its card says, as account, phase, cause and rung."""

from __future__ import annotations

from dataclasses import replace

from memc.diagnose.excerpts import excerpts, places
from memc.diagnose.failures import other_failures
from memc.diagnose.judge import judge_message
from memc.diagnose.records import SCHEMA, Cause, Evidence, Finding
from memc.diagnose.replay import attribution
from memc.diagnose.smi import NEEDLES as SMI_NEEDLES
from memc.diagnose.smi import smi_finding
from memc.diagnose.snapshot import snapshot_finding
from memc.diagnose.summary import NEEDLE as SUMMARY_NEEDLE
from memc.diagnose.summary import summary_finding
from memc.diagnose.symptoms import SYMPTOMS, symptom_finding
from memc.diagnose.torch_message import NEEDLES as TORCH_NEEDLES
from memc.diagnose.torch_message import parse_message

__all__ = ["SCHEMA", "SYMPTOMS", "Cause", "Evidence", "Finding", "attribution", "diagnose", "symptom_finding"]

_PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


def diagnose(data: bytes) -> list[Finding]:
    """Returns everything that was recognised in a log, a summary, nvidia-smi's output or a snapshot.

    The first that failed comes first.

    Args:
        data: The whole input. A pickle is told by its first bytes and is never run.

    Raises:
        MemcError: When the input is a pickle that is refused, broken or no snapshot.
    """
    if data.startswith(_PICKLE_STARTS):
        return [snapshot_finding(data)]
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        data = data.decode("utf-16", "replace").encode()
    found = _torch_findings(data)
    others = list(other_failures(data))
    if any(finding.kind == "host-out-of-memory" for finding in others):
        others = [finding for finding in others if finding.kind != "process-killed"]
    if found:  # torch's failure ends the other processes: that they were killed says nothing more
        others = [finding for finding in others if finding.kind != "process-killed"]
    return [*found, *others, *_tables(data)]


def _torch_findings(data: bytes) -> list[Finding]:
    """Returns the findings on torch's messages, equal ones of several ranks as one; the first that failed first."""
    found: dict[tuple[object, ...], Finding] = {}
    lines_seen: set[int] = set()
    for excerpt in excerpts(data, places(data, TORCH_NEEDLES)):
        number, line = excerpt.quote(excerpt.at)
        message = parse_message(excerpt.message())
        if message is None or number in lines_seen or not _is_failure(line, bool(message.sizes)):
            continue
        lines_seen.add(number)
        finding = judge_message(message, excerpt)
        key = (finding.cause, finding.account, finding.phase)
        known = found.get(key)
        found[key] = finding if known is None else replace(known, seen=known.seen + 1)
    with_sizes = [finding for finding in found.values() if "tried" in finding.figures]
    return with_sizes or list(found.values())


def _is_failure(line: str, has_sizes: bool) -> bool:
    """Returns whether a line is a failure of the card rather than a remark, the host's, or a library's."""
    if any(word in line for word in ("Kill", "cgroup", "NCCL", "nccl", "at line", "HostAlloc", "pin_memory")):
        return False
    return has_sizes or "error" in line.lower() or "CUDA out of memory" in line or "HIP out of memory" in line


def _tables(data: bytes) -> list[Finding]:
    """Returns the findings on memory_summary's table and on nvidia-smi's output."""
    found = []
    if SUMMARY_NEEDLE in data:
        at = data.rfind(SUMMARY_NEEDLE)
        excerpt = next(excerpts(data, [at]))
        found.append(summary_finding(excerpt.lines, excerpt.numbers))
    places_of_smi = places(data, SMI_NEEDLES)
    if places_of_smi:
        excerpt = next(excerpts(data, places_of_smi[-1:]))
        found.append(smi_finding(excerpt.lines, excerpt.numbers))
    return [finding for finding in found if finding is not None]
