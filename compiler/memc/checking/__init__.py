"""Are generated folders what their specs yield, unedited and complete; and if not, what changed."""

from memc.checking.check import check_folder, check_paths
from memc.checking.edits import unified_diff
from memc.checking.findings import Finding, FolderReport, Level, exit_code_of
from memc.checking.formats import FORMATS, formatted

__all__ = [
    "FORMATS",
    "Finding",
    "FolderReport",
    "Level",
    "check_folder",
    "check_paths",
    "exit_code_of",
    "formatted",
    "unified_diff",
]
