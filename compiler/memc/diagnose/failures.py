"""Other ways in which a log shows that memory ran out: the host, communication, libraries, quantisation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memc.diagnose.excerpts import Excerpt, excerpts, places
from memc.diagnose.phases import doing
from memc.diagnose.records import Cause, Evidence, Finding
from memc.diagnose.remedies import remedies
from memc.ledger.entries import Account, Phase, Resource


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    kind: str
    needles: tuple[bytes, ...]
    line: str
    cause: Cause
    account: Account | None
    resource: Resource
    sentence: str
    phase: Phase | None = None


_PATTERNS = (
    _Pattern(
        kind="host-out-of-memory",
        needles=(b"Out of memory: Kill", b"oom-kill", b"oom_kill", b"OOMKilled", b"Memory cgroup out of memory"),
        line=r"Out of memory: Kill(ed)? process|oom-kill|oom_kill|OOMKilled|Memory cgroup out of memory",
        cause=Cause.HOST,
        account=None,
        resource=Resource.HOST,
        sentence="the system ended a process because host memory (or the container's share of it) ran out",
    ),
    _Pattern(
        kind="process-killed",
        needles=(b"Killed", b"SIGKILL", b"exitcode: -9", b"exitcode  : -9", b"return code = -9", b"exit code 137"),
        line=r"^\s*Killed\s*$|: line \d+: +\d+ Killed|\bSIGKILL\b|exitcode *: *-9|return code = -9|exit code 137"
        r"|^\S*\[?\d*\]?\s+\d+ Killed",
        cause=Cause.HOST,
        account=None,
        resource=Resource.HOST,
        sentence="a process was killed (signal 9), as the system does when host memory runs out; dmesg tells",
    ),
    _Pattern(
        kind="host-allocation-failed",
        needles=(b"DefaultCPUAllocator", b"Cannot allocate memory", b"MemoryError", b"cudaHostAlloc", b"pin_memory"),
        line=r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|^\s*(numpy\S*)?MemoryError"
        r"|(cudaHostAlloc|pin_memory).*out of memory",
        cause=Cause.HOST,
        account=None,
        resource=Resource.HOST,
        sentence="an allocation in host memory failed",
    ),
    _Pattern(
        kind="shared-memory",
        needles=(b"insufficient shared memory", b"Bus error", b"/dev/shm", b"No space left on device (28)"),
        line=r"insufficient shared memory|DataLoader worker.*Bus error|(unable to|cannot|failed to).*/dev/shm",
        cause=Cause.SHARED_MEMORY,
        account=None,
        resource=Resource.HOST,
        sentence="a data loader worker found no shared memory",
    ),
    _Pattern(
        kind="nccl-out-of-memory",
        needles=(b"NCCL", b"nccl"),
        line=r"(NCCL|nccl).*(out of memory|Cuda failure 2)|Failed to CUDA (calloc|malloc)",
        cause=Cause.BUCKETS,
        account=Account.WORKSPACE,
        resource=Resource.GPU,
        sentence="NCCL found no room on the card for its buffers, which lie outside torch's allocator",
    ),
    _Pattern(
        kind="cublas-out-of-memory",
        needles=(
            b"CUBLAS_STATUS_ALLOC_FAILED",
            b"CUBLAS_STATUS_NOT_INITIALIZED",
            b"CUDNN_STATUS_ALLOC_FAILED",
            b"CUSOLVER_STATUS_ALLOC_FAILED",
            b"HIPBLAS_STATUS_ALLOC_FAILED",
        ),
        line=r"(CUBLAS|CUDNN|CUSOLVER|HIPBLAS)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)",
        cause=Cause.LIBRARY,
        account=Account.WORKSPACE,
        resource=Resource.GPU,
        sentence="a CUDA library found no room on the card for its handle or workspace",
    ),
    _Pattern(
        kind="bitsandbytes-out-of-memory",
        needles=(b"Error out of memory at line", b"Some modules are dispatched on the CPU"),
        line=r"Error out of memory at line \d+ in file|Some modules are dispatched on the CPU or the disk",
        cause=Cause.STATIC,
        account=Account.PARAMETERS,
        resource=Resource.GPU,
        sentence="bitsandbytes found no room on the card for quantised weights or paged states",
        phase=Phase.LOAD,
    ),
)


def other_failures(data: bytes) -> Iterator[Finding]:
    """Yields one finding per kind of failure that stands in a log, beside torch's own message."""
    for pattern in _PATTERNS:
        found = [excerpt for excerpt in excerpts(data, places(data, pattern.needles)) if _matches(pattern, excerpt)]
        if found:
            yield _finding(pattern, found)


def _matches(pattern: _Pattern, excerpt: Excerpt) -> bool:
    return re.search(pattern.line, excerpt.lines[excerpt.at]) is not None


def _finding(pattern: _Pattern, found: list[Excerpt]) -> Finding:
    lines = {excerpt.numbers[excerpt.at]: excerpt.quote(excerpt.at) for excerpt in found}
    run = doing(found[0].before())
    return Finding(
        kind=pattern.kind,
        cause=pattern.cause,
        account=pattern.account,
        phase=pattern.phase or run.phase,
        resource=pattern.resource,
        sentence=pattern.sentence,
        evidence=tuple(Evidence(line=number, text=text) for number, text in list(lines.values())[:3]),
        remedies=remedies(pattern.cause),
        seen=len(lines),
    )
