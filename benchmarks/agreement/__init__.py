"""The ledger beside the trace over the catalogue: which cases, what was traced, how far they are apart."""
