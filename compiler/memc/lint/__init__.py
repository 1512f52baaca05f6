"""Files that memc never wrote: do they agree with each other, with the versions and with the hardware."""

from memc.lint.context import Given
from memc.lint.lint import Linted, lint_files, lint_path
from memc.lint.records import Document, Kind, Place, Remark, Weight

__all__ = ["Document", "Given", "Kind", "Linted", "Place", "Remark", "Weight", "lint_files", "lint_path"]
