"""memc's answers to one report: the run as it was asked for, and the same with the choice left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from memc import driver
from memc.driver import Answer
from memc.errors import MemcError
from memc.ledger import Ledger
from memc.plan import Infeasible, Plan
from memc.report import plan_report, refusal_report
from memc.solver.search import Machine
from memc.solver.solve import machine_for
from memc.spec import load_spec
from rich.console import Console

from reported.reading import Reading, read


@dataclass(frozen=True)
class Asked:
    """One spec and what became of it.

    Attributes:
        path: The spec file.
        answer: A plan or a refusal; None when the spec itself was refused.
        error: Why it was refused, as a person reads it; empty otherwise.
    """

    path: Path
    answer: Answer | None
    error: str

    @property
    def result(self) -> Plan | Infeasible | None:
        """The plan or the refusal."""
        return None if self.answer is None else self.answer.result

    @property
    def plan(self) -> Plan | None:
        """The plan; None without one."""
        return self.result if isinstance(self.result, Plan) else None

    @cached_property
    def text(self) -> str:
        """Everything that memc says, on one line, lower case."""
        if self.result is None:
            return self.error.lower()
        console = Console(width=10_000, highlight=False)
        with console.capture() as capture:
            console.print(plan_report(self.result) if isinstance(self.result, Plan) else refusal_report(self.result))
        return " ".join(capture.get().split()).lower()

    @cached_property
    def files(self) -> dict[str, str]:
        """The files that memc would write; empty without a plan."""
        if self.answer is None or self.plan is None:
            return {}
        try:
            return driver.generate(self.answer, self.path.parent / "out", "memc compile spec.yaml")
        except MemcError:  # priced, but not written
            return {}

    @cached_property
    def machine(self) -> Machine | None:
        """The priced question; None when the spec itself was refused."""
        if self.answer is None:
            return None
        loaded = self.answer.loaded
        gpu, model = driver.facts_of(loaded)
        return machine_for(loaded, model, gpu, loaded.spec.data.samples)

    @cached_property
    def ledger(self) -> Ledger | None:
        """The bill of exactly what the spec asks, no technique added; None when the spec itself was refused."""
        return None if self.machine is None else self.machine.estimator.ledger(self.machine.question.asked)


@dataclass(frozen=True)
class Answers:
    """What memc says to one report.

    Attributes:
        report: The entry of the collection.
        reading: What its sketch was read as.
        asked: The run as it was asked for; None when the sketch cannot be planned.
        open: The same with the choice left to memc.
        folder: Where files may be written.
    """

    report: Mapping[str, Any]
    reading: Reading
    asked: Asked | None
    open: Asked | None
    folder: Path

    @property
    def text(self) -> str:
        """Everything that memc says to either."""
        return " ".join(item.text for item in (self.asked, self.open) if item is not None)


def answered(report: Mapping[str, Any], folder: Path) -> Answers:
    """Returns memc's answers to a report; specs and models are written into `folder`."""
    reading = read(report, folder)
    asked = None if reading.asked is None else ask(reading.asked, folder / "asked")
    free = None if reading.open is None else ask(reading.open, folder / "open")
    return Answers(report, reading, asked, free, folder)


def ask(spec: Mapping[str, Any], folder: Path) -> Asked:
    """Returns what becomes of one spec, which is written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(dict(spec), sort_keys=False), encoding="utf-8")
    try:
        return Asked(path, driver.answer_of(load_spec(path)), "")
    except MemcError as error:
        return Asked(path, None, str(error))
