"""Looks into the ledger and into what a run has kept."""
