"""Evaluation of held-out problems: the one place where a rollout grades for itself."""
