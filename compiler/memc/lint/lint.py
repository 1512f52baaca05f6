"""`lint_path`: what is wrong with the files of a folder, run by run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memc.lint.agreement import agreement_remarks
from memc.lint.calls import call_remarks
from memc.lint.combine import combination_remarks
from memc.lint.context import Context, Given, context_of
from memc.lint.fitting import fitting_remarks
from memc.lint.gather import files_below, read_files, runs_in
from memc.lint.generations import generation_remarks
from memc.lint.keys import key_remarks
from memc.lint.records import Document, Remark, Weight
from memc.lint.requirements import planned_versions
from memc.lint.statements import statements_of
from memc.lint.world import world_remarks

CHECKS: tuple[Callable[[Context], Iterator[Remark]], ...] = (
    agreement_remarks,
    world_remarks,
    combination_remarks,
    fitting_remarks,
    generation_remarks,
    key_remarks,
    call_remarks,
)
"""Everything that is looked at, in the order in which remarks are given."""
_ORDER = {Weight.ERROR: 0, Weight.WARNING: 1, Weight.NOTE: 2}


@dataclass(frozen=True, kw_only=True)
class Linted:
    """What the lint made of a path.

    Attributes:
        documents: What was recognised.
        remarks: Errors first, then in the order of the files.
    """

    documents: tuple[Document, ...]
    remarks: tuple[Remark, ...]


def lint_path(path: Path, given: Given, passed_over: Iterable[Path] = ()) -> Linted:
    """Returns what is wrong with the files at or below a path.

    Args:
        path: A file or folder.
        given: What is known besides the files.
        passed_over: Folders that are not looked into.

    Raises:
        MemcError: When a card is given that is not in the catalogue.
    """
    return lint_files(files_below(path, passed_over), given, path if path.is_dir() else path.parent)


def lint_files(files: Iterable[Path], given: Given, root: Path) -> Linted:
    """Returns what is wrong with some files; nothing is imported, run or written.

    Args:
        files: They.
        given: What is known besides.
        root: Folder that names in the files may be relative to.

    Raises:
        MemcError: When a card is given that is not in the catalogue.
    """
    read = read_files(files)
    remarks = list(read.remarks)
    for run in runs_in(read.documents, root):
        versions = planned_versions(run.documents, given.versions)
        context = context_of(statements_of(run.documents, versions), versions, given, root)
        for check in CHECKS:
            remarks += check(context)
    found = {(remark.code, remark.place, remark.message): remark for remark in remarks}
    order = sorted(
        found.values(), key=lambda remark: (_ORDER[remark.weight], str(remark.place.path), remark.place.line)
    )
    return Linted(documents=read.documents, remarks=tuple(order))
