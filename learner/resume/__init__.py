"""What a resumed run goes on from: the journal and the checkpoints."""
