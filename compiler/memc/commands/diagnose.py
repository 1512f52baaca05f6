"""`memc diagnose`: why a run ran out of memory, and what to do next."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memc.commands.completion import complete_symptom
from memc.errors import ExitCode, Location, MemcError, usage_error
from memc.units import format_gib, format_seconds

if TYPE_CHECKING:
    from memc.diagnose import Finding
    from memc.driver import Answer
    from memc.solver.cuts import Cut

MAX_BYTES = 1 << 30
_SHOWN_CUTS = 3


@click.command("diagnose")
@click.argument("file", required=False, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--symptom", shell_complete=complete_symptom, help="Name what is seen; `list` lists them.")
@click.option("--spec", type=click.Path(path_type=Path), help="A spec or a folder of memc: names the next rung in GiB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def command(file: Path | None, symptom: str | None, spec: Path | None, as_json: bool) -> None:
    """Say why a run ran out of memory: account, phase, likely cause, evidence, next rung.

    FILE is a training log, the text of torch.cuda.memory_summary(), a snapshot of torch.cuda.memory._dump_snapshot()
    (read as data, never run), or the output of nvidia-smi; `-` reads standard input. Of a log beyond 1 GiB the end is
    read. Exit code 2 when nothing was recognised.
    """
    from memc.diagnose import diagnose, symptom_finding

    if (file is None) == (symptom is None):
        raise usage_error(
            "diagnose-needs-input",
            "give a file or --symptom, and not both",
            hint="memc diagnose train.log, nvidia-smi | memc diagnose -, or memc diagnose --symptom list",
        )
    if symptom == "list":
        _print_symptoms(as_json)
        return
    findings = [symptom_finding(symptom)] if symptom is not None else diagnose(_read(file or Path("-")))
    if not findings:
        raise _nothing(file or Path("-"))
    answer = None if spec is None else _answer(spec)
    cuts = [() if answer is None else _cuts(answer, finding) for finding in findings]
    if as_json:
        click.echo(json.dumps(_document(findings, cuts, answer), indent=2, sort_keys=True, ensure_ascii=False))
        return
    for number, (finding, found) in enumerate(zip(findings, cuts, strict=True)):
        for line in ([""] if number else []) + _lines(finding, found, answer):
            click.echo(line)


def _read(file: Path) -> bytes:
    """Returns the input; of a very large file, its end."""
    try:
        if str(file) == "-":
            return sys.stdin.buffer.read(MAX_BYTES)
        size = file.stat().st_size
        with file.open("rb") as stream:
            if size > MAX_BYTES and stream.read(1) != b"\x80":
                stream.seek(-MAX_BYTES, os.SEEK_END)
            else:
                stream.seek(0) if stream.seekable() else None
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise usage_error(
            "cannot-read",
            f"{file} cannot be read: {error.strerror or error}",
            where=Location(file=str(file)),
            hint="name a file that you may read, or - for standard input",
        ) from error


def _nothing(file: Path) -> MemcError:
    shown = "standard input" if str(file) == "-" else str(file)
    return MemcError(
        usage_error(
            "nothing-recognised",
            f"{shown} holds no sign of memory running out that memc knows",
            hint="give the part of the log with the error, memory_summary(), a snapshot or nvidia-smi's output; or say "
            "what you see with --symptom (memc diagnose --symptom list)",
        ).diagnostics,
        ExitCode.USAGE,
    )


def _answer(spec: Path) -> Answer:
    from memc import driver

    return driver.answer(driver.spec_path_of(spec))


def _cuts(answer: Answer, finding: Finding) -> tuple[Cut, ...]:
    """Returns what the ladder has against a finding; nothing when the card's memory is not what was short."""
    from memc import driver
    from memc.diagnose import Cause
    from memc.ledger.entries import Account, Resource
    from memc.solver.cuts import next_cuts

    outside = (Cause.OTHER_PROCESS, Cause.ALLOCATOR_LIMIT, Cause.KV_CACHE, Cause.OVER_OPTIMISED, Cause.IN_USE)
    if finding.resource is not Resource.GPU or finding.cause in outside:
        return ()
    account = None if finding.account is Account.WORKSPACE else finding.account
    return next_cuts(answer.loaded, answer.result, driver.count_samples(answer.loaded), account)


def _document(findings: list[Finding], cuts: list[tuple[Cut, ...]], answer: Answer | None) -> dict[str, Any]:
    from memc.diagnose import SCHEMA
    from memc.document import record_document
    from memc.plan import Infeasible

    refused = answer is not None and isinstance(answer.result, Infeasible)
    return {
        "schema": SCHEMA,
        "findings": [
            {**finding.document(), "next": [record_document(cut) for cut in found]}
            for finding, found in zip(findings, cuts, strict=True)
        ],
        "spec": None if answer is None else {"name": answer.loaded.name, "feasible": not refused},
    }


def _lines(finding: Finding, cuts: tuple[Cut, ...], answer: Answer | None) -> list[str]:
    """Returns one finding for a terminal."""
    account = "" if finding.account is None else f"account {finding.account.value.replace('_', ' ')}, "
    phase = "phase unknown" if finding.phase is None else f"phase {finding.phase.value}"
    times = f" ({finding.seen} times)" if finding.seen > 1 else ""
    lines = [f"CAUSE: {finding.cause}{times}", f"WHERE: {account}{phase}, on the {finding.resource}"]
    lines.append(f"WHAT:  {finding.sentence}")
    lines += [f"   | {f'{item.line}: ' if item.line else ''}{item.text}" for item in finding.evidence]
    if answer is not None:
        lines += [*_against(finding, answer), *_next(cuts, answer)]
    lines.append("DO:")
    return lines + [f"  {number}. {remedy}" for number, remedy in enumerate(finding.remedies, 1)]


def _against(finding: Finding, answer: Answer) -> list[str]:
    """Returns in what the run that was read differs from the spec: another card, or more memory than its plan takes."""
    from memc.plan import Plan

    result, lines = answer.result, []
    capacity, held = finding.figures.get("capacity", 0), finding.figures.get("allocated", 0)
    if capacity and abs(capacity - result.budget.capacity_bytes) > result.budget.capacity_bytes // 10:
        shown = f"{format_gib(capacity)}, {result.gpu.name} {format_gib(result.budget.capacity_bytes)}"
        lines.append(f"NOTE:  the card in the log has {shown}: the spec names another card")
    if isinstance(result, Plan) and held > result.ledger.gpu.peak_allocated_bytes * 11 // 10:
        peak = format_gib(result.ledger.gpu.peak_allocated_bytes)
        lines.append(
            f"NOTE:  the run held {format_gib(held)} in tensors, the plan of {answer.loaded.name} takes {peak} at its "
            "peak: the run was not this plan; run what memc compile writes"
        )
    return lines


def _next(cuts: tuple[Cut, ...], answer: Answer) -> list[str]:
    """Returns the next rungs with their figures."""
    from memc.plan import Infeasible

    name = answer.loaded.name
    if isinstance(answer.result, Infeasible):
        changes = [f"{item.input}: {item.now} -> {item.needed}" for item in answer.result.relaxations if item.needed]
        return [f"NEXT:  by the ledger {name} does not fit at all; one of these alone makes it fit:"] + [
            f"  {change}" for change in changes or ["no change of one input does"]
        ]
    if not cuts:
        return [f"NEXT:  the ladder of {name} has nothing more against this account"]
    lines = [f"NEXT:  by the ledger of {name}, which needs {format_gib(cuts[0].peak_before_bytes)} now:"]
    for cut in cuts[:_SHOWN_CUTS]:
        instead = f" instead of {cut.replaces}" if cut.replaces else ""
        saved = f"{format_gib(cut.account_saved_bytes)} less there, " if cut.account_saved_bytes else ""
        slower = f", {format_seconds(cut.step_seconds_before)} -> {format_seconds(cut.step_seconds)} per step"
        slower = "" if answer.result.clock.unknown else slower
        lines.append(f"  rung {cut.rung}: {cut.technique}{instead}: {saved}peak {format_gib(cut.peak_bytes)}{slower}")
    return lines


def _print_symptoms(as_json: bool) -> None:
    from memc.diagnose import SYMPTOMS

    if as_json:
        click.echo(json.dumps({name: symptom.seen for name, symptom in SYMPTOMS.items()}, indent=2))
        return
    width = max(map(len, SYMPTOMS))
    for name, symptom in SYMPTOMS.items():
        click.echo(f"{name.ljust(width)}  {symptom.seen}")
