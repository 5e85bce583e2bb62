"""A model under DeepSpeed: the policy, the critic, adapters, the optimizer, and the memory that they take."""
