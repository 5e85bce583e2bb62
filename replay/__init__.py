"""The ledger: what was leased, committed, taken and trained, and the data behind it."""
