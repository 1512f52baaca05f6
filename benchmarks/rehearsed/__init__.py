"""The ledger beside rehearsals: which cases, what was rehearsed, how far they are apart."""
