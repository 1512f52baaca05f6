"""The HTML report: one self-contained page with charts, and with the ledger itself to play what-if with."""

from memc.page.build import report_page

__all__ = ["report_page"]
