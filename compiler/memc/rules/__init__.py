"""Named rules about combinations of settings that bite, as facts with version gates."""

from memc.rules.check import broken_rules, facts_of, message
from memc.rules.records import Rule, Severity, Test
from memc.rules.table import load_rules

__all__ = ["Rule", "Severity", "Test", "broken_rules", "facts_of", "load_rules", "message"]
