"""The lint's remarks as findings of a check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from memc.checking.findings import Finding, FolderReport, Level, Related
from memc.driver import LOCK_NAME
from memc.errors import MemcError
from memc.lint import Given, Remark, Weight, lint_files, lint_path
from memc.spec import LoadedSpec

_LEVELS = {Weight.ERROR: Level.ERROR, Weight.WARNING: Level.WARNING, Weight.NOTE: Level.NOTE}


def lint_reports(paths: Sequence[Path], written: Iterable[Path], given: Given) -> dict[Path, FolderReport]:
    """Returns a report for each path that holds files that memc never wrote; files that are named share one.

    Args:
        paths: Folders and files that are there.
        written: Folders that memc wrote, which are compared, not linted.
        given: What is known besides the files.

    Raises:
        MemcError: When a card is given that is not in the catalogue.
    """
    known = tuple(written)
    reports: dict[Path, FolderReport] = {}
    files = [path for path in paths if not path.is_dir() and not (path.parent / LOCK_NAME).exists()]
    if files:
        linted = lint_files(files, given, files[0].parent)
        told = {document.path for document in linted.documents} | {remark.place.path for remark in linted.remarks}
        shared = _report(files[0] if len(files) == 1 else files[0].parent, linted.remarks, len(linted.documents))
        reports |= {path: shared for path in files if path in told}
    for path in paths:
        if path.is_dir():
            linted = lint_path(path, given, known)
            if linted.documents or linted.remarks:
                reports[path] = _report(path, linted.remarks, len(linted.documents))
    return reports


def each_report(reports: Mapping[Path, FolderReport]) -> list[FolderReport]:
    """Returns the reports, one that several files share once."""
    return list({id(report): report for report in reports.values()}.values())


def edited_findings(folder: Path, loaded: LoadedSpec) -> list[Finding]:
    """Returns what the lint says of a folder that memc wrote and somebody edited."""
    hardware = loaded.spec.hardware
    given = Given(
        gpu=hardware.gpu,
        model=loaded.spec.model,
        gpus_per_node=hardware.count,
        nodes=hardware.nodes,
        told=loaded.path.name,
    )
    try:
        return [finding_of(remark) for remark in lint_path(folder, given).remarks]
    except MemcError:
        return []


def finding_of(remark: Remark) -> Finding:
    """Returns a remark as a finding."""
    place = remark.place
    return Finding(
        code=remark.code,
        level=_LEVELS[remark.weight],
        path=place.path,
        message=remark.message,
        hint=remark.hint,
        line=place.line,
        column=place.column,
        related=tuple(Related(path=other.path, line=other.line, column=other.column) for other in remark.others),
    )


def _report(path: Path, remarks: Iterable[Remark], documents: int) -> FolderReport:
    findings = tuple(finding_of(remark) for remark in remarks)
    return FolderReport(folder=path, spec=None, findings=findings, linted=max(documents, int(bool(findings))))
