"""Published memory measurements, read as pinned configurations and priced by the ledger."""
