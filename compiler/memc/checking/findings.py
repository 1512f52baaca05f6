"""What a check finds, as records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from memc.comparison import Comparison
from memc.errors import ExitCode


class Level(StrEnum):
    """How much a finding weighs: an error fails the check, a warning and a note do not."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class Related:
    """Another place that a finding is about: what the first one contradicts."""

    path: Path
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else str(self.path)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found.

    Attributes:
        code: Kebab-case: what kind of thing.
        level: How much it weighs.
        path: The file it is about.
        message: One sentence.
        hint: What to do; empty when another finding says it.
        line: Line of the file, 1-based; 0 when it is about the whole file.
        diff: Unified diff from what is there to what memc writes; empty without one.
        exit_code: What an error makes the check exit with.
        column: Column of the line, 1-based; 0 when it is about the whole line.
        related: The other places that are in play.
    """

    code: str
    level: Level
    path: Path
    message: str
    hint: str = ""
    line: int = 0
    diff: str = ""
    exit_code: ExitCode = ExitCode.STALE
    column: int = 0
    related: tuple[Related, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """One folder that was checked.

    Attributes:
        folder: It; of files that memc never wrote, the path that was named.
        spec: The spec it was compiled from; None when its lock does not tell.
        findings: Errors first.
        comparison: Its lock beside the one that memc writes now; None when one of them is not to be had.
        linted: Documents that memc never wrote and that were looked through; 0 for a folder of memc's own.
    """

    folder: Path
    spec: Path | None
    findings: tuple[Finding, ...]
    comparison: Comparison | None = None
    linted: int = 0

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that fail the check."""
        return tuple(finding for finding in self.findings if finding.level is Level.ERROR)

    @property
    def current(self) -> bool:
        """Whether nothing fails the check."""
        return not self.errors


def exit_code_of(reports: Iterable[FolderReport]) -> ExitCode:
    """Returns what a check exits with: 4 when anything is stale or edited, else the code of its first error, else 0."""
    codes = [finding.exit_code for report in reports for finding in report.errors]
    if ExitCode.STALE in codes:
        return ExitCode.STALE
    return codes[0] if codes else ExitCode.OK
