"""A new version in an engine: how it is loaded, and the check that the engine computes what the learner does."""
