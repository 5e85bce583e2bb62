"""The policy's forward pass: from a micro-batch to log-probs and entropies."""
