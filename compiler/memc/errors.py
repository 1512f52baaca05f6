"""Diagnostics, exit codes and the one exception that carries them. Imports nothing of memc."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit status of every memc command."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    STALE = 4
    VERIFICATION_FAILED = 5


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a diagnostic points: a file, a position in it (1-based; 0 = unknown), a dotted field path."""

    file: str = ""
    line: int = 0
    column: int = 0
    field: str = ""

    def __str__(self) -> str:
        place = self.file
        if place and self.line:
            place += f":{self.line}:{self.column}"
        return " · ".join(part for part in (place, self.field) if part)


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One finding, as every command shows it.

    Attributes:
        code: Kebab-case and unique, for example ``spec-unknown-key``.
        message: One sentence with the numbers in it.
        where: The place it points at; None when there is no file to point at.
        context: Up to six lines that help to see the cause.
        hint: What to change, as an instruction. Empty when nothing can be changed.
    """

    code: str
    message: str
    where: Location | None = None
    context: tuple[str, ...] = ()
    hint: str = ""

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.message}"]
        if self.where is not None and str(self.where):
            lines.append(f"  --> {self.where}")
        lines += [f"   | {line}" for line in self.context[:6]]
        if self.hint:
            lines.append(f"  help: {self.hint}")
        return "\n".join(lines)


@dataclass(eq=False)
class MemcError(Exception):
    """Stops a command with one or more diagnostics and an exit code.

    Attributes:
        diagnostics: Everything that was found, in the order of the input.
        exit_code: What the process exits with.
    """

    diagnostics: tuple[Diagnostic, ...]
    exit_code: ExitCode = field(default=ExitCode.USAGE)

    def __str__(self) -> str:
        return "\n".join(str(diagnostic) for diagnostic in self.diagnostics)


def usage_error(code: str, message: str, *, where: Location | None = None, hint: str = "") -> MemcError:
    """Returns a one-diagnostic error that exits with `ExitCode.USAGE`."""
    return MemcError((Diagnostic(code=code, message=message, where=where, hint=hint),))
