"""Runs the emitted script through its own launcher, reads what every rank measured, and compares it with the ledger."""

from memc.verify.run import DEVICES, verify
from memc.verify.text import text_lines
from memc.verify.verdict import PhaseComparison, RankVerdict, Verification

__all__ = ["DEVICES", "PhaseComparison", "RankVerdict", "Verification", "text_lines", "verify"]
