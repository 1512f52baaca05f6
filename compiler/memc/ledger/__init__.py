"""Bytes: entries by account, moment and resource, and the estimator that adds them up."""

from memc.ledger.constants import LedgerFacts, ledger_facts
from memc.ledger.entries import Account, Entry, Grade, Ledger, Moment, Phase, Resource, ResourceLedger
from memc.ledger.estimate import Estimator, Price

__all__ = [
    "Account",
    "Entry",
    "Estimator",
    "Grade",
    "Ledger",
    "LedgerFacts",
    "Moment",
    "Phase",
    "Price",
    "Resource",
    "ResourceLedger",
    "ledger_facts",
]
