"""What was traced: one line per case in a file that a later run goes on from, and a table that is checked in."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from time import monotonic

from agreement.cases import MODES, Mode, Shape, config_of, facts_of, training_config

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "compiler" / "memc" / "trace"
TABLE = ROOT / "benchmarks" / "agreement" / "traced.csv"


@dataclass(frozen=True)
class Traced:
    """One traced case.

    Attributes:
        model: Key in the catalogue.
        mode: Name of the mode.
        peak_bytes: Allocated peak of the step, cuBLAS workspaces left out; 0 when it could not be traced.
        moments: Allocated peaks by instant of the step.
        seconds: How long it took.
        error: Why it could not be traced; empty when it could.
        trace: Digest of the trace's source and of the config.
    """

    model: str
    mode: str
    peak_bytes: int
    moments: dict[str, int]
    seconds: float
    error: str
    trace: str


def trace_digest(model: str, sources: str) -> str:
    """Returns the digest that a traced case of `model` carries; `sources` is that of the trace's modules."""
    return hashlib.sha256(f"{sources}{config_digest(model)}".encode()).hexdigest()[:12]


def config_digest(model: str) -> str:
    """Returns a digest of the config.json of a catalogue model."""
    return hashlib.sha256(json.dumps(config_of(model), sort_keys=True).encode()).hexdigest()[:8]


@cache
def source_digest() -> str:
    """Returns a digest of the trace's modules, as they are when first asked for: what is loaded then stays loaded."""
    texts = (path.read_bytes() for path in sorted(TRACE.glob("*.py")))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def read_traces(path: Path, *, keep: bool) -> dict[tuple[str, str], Traced]:
    """Returns the traced cases of a results file by model and mode, the last of each.

    Args:
        path: The file; there may be none yet.
        keep: Whether peaks stay that other versions of the trace's source found.
    """
    if not path.is_file():
        return {}
    sources, found = source_digest(), {}
    digests: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        case = Traced(**json.loads(line))
        current = digests.setdefault(case.model, trace_digest(case.model, sources))
        if case.trace == current or (keep and not case.error):
            found[case.model, case.mode] = case
    return found


def run_traces(wanted: Sequence[tuple[Shape, Mode]], path: Path, *, jobs: int) -> Iterator[Traced]:
    """Traces cases, adds each to the results file as soon as it is there, and yields it.

    Args:
        wanted: The cases.
        path: The results file.
        jobs: Processes; each imports torch once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for case in _spread([(shape.key, mode) for shape, mode in wanted], jobs):
            file.write(json.dumps(asdict(case)) + "\n")
            file.flush()
            yield case


def _spread(wanted: Sequence[tuple[str, Mode]], jobs: int) -> Iterator[Traced]:
    if jobs == 1:
        if wanted:
            prepare()
        for model, mode in wanted:
            yield from trace_cases(model, [mode])
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=prepare) as pool:
        groups = [(model, list(cases)) for model, cases in groupby(wanted, key=lambda case: (case[0], case[1].method))]
        pending = [pool.submit(trace_cases, model, [mode for _, mode in cases]) for (model, _), cases in groups]
        for future in as_completed(pending):
            yield from future.result()


def trace_cases(model: str, modes: Iterable[Mode]) -> list[Traced]:
    """Returns the traced cases of one model; an error is part of a case, and does not end the others."""
    from memc.trace import step_peaks

    sources, found = source_digest(), []
    for mode in modes:
        start, peak, error = monotonic(), 0, ""
        instants: dict[str, int] = {}
        try:
            peaks = step_peaks(training_config(facts_of(model), mode), config_of(model))
            instants = {instant.value: at.allocated_bytes for instant, at in peaks.items()}
            peak = max(instants.values())
        except Exception as problem:  # what libraries raise on some model is not known beforehand; it is reported
            error = f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:200]
        seconds = round(monotonic() - start, 2)
        found.append(Traced(model, str(mode), peak, instants, seconds, error, trace_digest(model, sources)))
    return found


def prepare() -> None:
    """Readies a process that does nothing but trace: one thread, no warnings, no search for garbage among imports."""
    import gc
    import warnings
    from importlib import import_module

    import torch

    import_module("memc.trace")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def table_text(cases: Iterable[Traced], versions: Mapping[str, str]) -> str:
    """Returns the checked-in table: one row per model, one column per mode, peaks in bytes; empty where none is known.

    Args:
        cases: Traced cases.
        versions: Library versions that they were traced with.
    """
    rows: dict[str, dict[str, int]] = {}
    for case in cases:
        if not case.error:
            rows.setdefault(case.model, {})[case.mode] = case.peak_bytes
    text = io.StringIO()
    text.write("# " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + "\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["model", "config", *map(str, MODES)])
    for model in sorted(rows):
        writer.writerow([model, config_digest(model), *(rows[model].get(str(mode), "") for mode in MODES)])
    return text.getvalue()


@dataclass(frozen=True)
class Table:
    """The checked-in table.

    Attributes:
        versions: Library versions that the cases were traced with, by name.
        configs: Digest of the config.json that was traced, by model.
        peaks: Allocated peaks in bytes, by model and mode.
    """

    versions: dict[str, str]
    configs: dict[str, str]
    peaks: dict[tuple[str, str], int]


def read_table(path: Path = TABLE) -> Table:
    """Returns the checked-in table."""
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    named = (item.partition(" ") for item in first.removeprefix("# ").split(", "))
    configs: dict[str, str] = {}
    peaks: dict[tuple[str, str], int] = {}
    for row in csv.DictReader(lines):
        model = row.pop("model")
        configs[model] = row.pop("config")
        peaks |= {(model, mode): int(peak) for mode, peak in row.items() if peak}
    return Table({name: version for name, _, version in named}, configs, peaks)
