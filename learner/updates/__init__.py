"""One step of the ledger as updates of the model: its rows, their columns, mini-batches and passes."""
