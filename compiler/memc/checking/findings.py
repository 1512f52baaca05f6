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
    """

    code: str
    level: Level
    path: Path
    message: str
    hint: str = ""
    line: int = 0
    diff: str = ""
    exit_code: ExitCode = ExitCode.STALE


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """One folder that was checked.

    Attributes:
        folder: It.
        spec: The spec it was compiled from; None when its lock does not tell.
        findings: Errors first.
        comparison: Its lock beside the one that memc writes now; None when one of them is not to be had.
    """

    folder: Path
    spec: Path | None
    findings: tuple[Finding, ...]
    comparison: Comparison | None = None

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
