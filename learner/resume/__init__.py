"""What a resumed run continues from: the journal and the checkpoints."""
