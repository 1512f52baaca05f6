"""Runs the emitted script through its own launcher, reads what every rank measured, and compares it with the ledger."""

from memc.verify.attribution import Attribution
from memc.verify.run import DEVICES, verify
from memc.verify.starts import Settings
from memc.verify.text import text_lines
from memc.verify.verification import PhaseComparison, RankVerdict, Verification

__all__ = [
    "DEVICES",
    "Attribution",
    "PhaseComparison",
    "RankVerdict",
    "Settings",
    "Verification",
    "text_lines",
    "verify",
]
