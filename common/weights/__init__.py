"""How weights travel from the learner to running rollout workers."""
