"""What was rehearsed: one line per case in a file that a later run goes on from, and a table that is checked in."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

from memc.driver import answer, compile_command, generate, write
from memc.errors import MemcError
from memc.plan import Plan

from rehearsed.cases import Case, write_spec

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "rehearsed" / "rehearsed.csv"
STEPS = 3
PHASES = ("load", "first_step", "steady", "save")
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes")


@dataclass(frozen=True)
class Rehearsed:
    """One rehearsed case.

    Attributes:
        case: Its name.
        spec: Digest of its spec.
        allocated, reserved: Peaks by probed phase in bytes, of the rank that has most; empty when it failed.
        host_bytes: Largest resident size of a process.
        ranks: Those that were played.
        seconds: How long it took.
        versions: Of the libraries.
        error: Why it failed; empty when it did not.
    """

    case: str
    spec: str
    allocated: dict[str, int]
    reserved: dict[str, int]
    host_bytes: int
    ranks: tuple[int, ...]
    seconds: float
    versions: dict[str, str]
    error: str


def spec_digest(case: Case) -> str:
    """Returns a digest of all that a case pins."""
    return hashlib.sha256(json.dumps(case.spec(), sort_keys=True).encode()).hexdigest()[:10]


def plan_of(case: Case, folder: Path) -> Plan:
    """Returns the plan of a case.

    Args:
        case: Which.
        folder: Where its spec is written.

    Raises:
        MemcError: When the spec is refused, or nothing fits.
    """
    result = answer(write_spec(case, folder)).result
    if isinstance(result, Plan):
        return result
    raise MemcError(result.diagnostics if hasattr(result, "diagnostics") else ())


def read_runs(path: Path) -> dict[str, Rehearsed]:
    """Returns the rehearsed cases of a results file by name, the last of each; there may be no file yet."""
    if not path.is_file():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["case"]: Rehearsed(**(line | {"ranks": tuple(line["ranks"])})) for line in lines}


def run_cases(todo: Sequence[Case], path: Path) -> Iterator[Rehearsed]:
    """Rehearses cases one after the other, adds each to the results file as soon as it is there, and yields it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for case in todo:
            run = run_case(case)
            file.write(json.dumps(asdict(run)) + "\n")
            file.flush()
            yield run


def run_case(case: Case) -> Rehearsed:
    """Compiles and rehearses one case; an error is part of it."""
    from memc.rehearse import rehearse  # what comparing with the table does without

    start, error = monotonic(), ""
    allocated: dict[str, int] = {}
    reserved: dict[str, int] = {}
    versions: dict[str, str] = {}
    host = 0
    numbers: tuple[int, ...] = ()
    with tempfile.TemporaryDirectory(prefix="memc-rehearsed-") as scratch:
        try:
            spec = write_spec(case, Path(scratch))
            folder = Path(scratch) / "out"
            write({folder: generate(answer(spec), folder, compile_command(spec, folder))}, keep=[spec])
            outcome = rehearse(folder, ranks=case.mode.played, steps=STEPS, on_line=lambda line: None).verification
            if outcome.diagnostics or not outcome.judged:
                error = " · ".join([*(str(one.message) for one in outcome.diagnostics), *outcome.log_tail[-3:]])
            numbers = tuple(rank.rank for rank in outcome.ranks)
            for rank in outcome.ranks:
                host = max(host, rank.host_rss_peak_bytes or 0)
                for phase in rank.phases:
                    allocated[phase.phase] = max(allocated.get(phase.phase, 0), phase.allocated_bytes)
                    reserved[phase.phase] = max(reserved.get(phase.phase, 0), phase.reserved_bytes)
            versions = {name: outcome.versions[name] for name in LIBRARIES if name in outcome.versions}
        except Exception as problem:  # what libraries raise in some mode is not known beforehand; it is reported
            error = f"{type(problem).__name__}: {problem}"
    error = " ".join(error.split())[:400]
    seconds = round(monotonic() - start, 1)
    return Rehearsed(case.name, spec_digest(case), allocated, reserved, host, numbers, seconds, versions, error)


def table_text(runs: Iterable[Rehearsed]) -> str:
    """Returns the checked-in table: one row per case and phase, peaks in bytes."""
    good = sorted((run for run in runs if not run.error), key=lambda run: run.case)
    versions: dict[str, str] = {}
    for run in good:
        versions |= run.versions
    text = io.StringIO()
    text.write("# " + ", ".join(f"{name} {found}" for name, found in sorted(versions.items())) + "\n")
    writer = csv.writer(text, lineterminator="\n")
    kinds = [f"{kind} {phase}" for phase in PHASES for kind in ("allocated", "reserved")]
    writer.writerow(["model", "mode", "ranks", "spec", "played", *kinds])
    for run in good:
        peaks = [sizes.get(phase, "") for phase in PHASES for sizes in (run.allocated, run.reserved)]
        writer.writerow([*run.case.split(" "), run.spec, " ".join(map(str, run.ranks)), *peaks])
    return text.getvalue()


def read_table(path: Path = TABLE) -> tuple[Mapping[str, str], dict[str, Rehearsed]]:
    """Returns library versions and rehearsed cases of the checked-in table."""
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    named = (item.partition(" ") for item in first.removeprefix("# ").split(", "))
    versions = {name: found for name, _, found in named}
    runs = {}
    for row in csv.DictReader(lines):
        case = f"{row['model']} {row['mode']} {row['ranks']}"
        allocated, reserved = (
            {phase: int(row[f"{kind} {phase}"]) for phase in PHASES if row[f"{kind} {phase}"]}
            for kind in ("allocated", "reserved")
        )
        numbers = tuple(int(number) for number in row["played"].split())
        runs[case] = Rehearsed(case, row["spec"], allocated, reserved, 0, numbers, 0.0, versions, "")
    return versions, runs
