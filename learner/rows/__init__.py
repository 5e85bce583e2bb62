"""From the ledger's groups to the tensors that a step is trained on."""
