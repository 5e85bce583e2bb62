"""Functions for scripts and notebooks, which no run of Tandem calls; tested like the rest.

``sequences``: padded batches of texts, their log-probs, and packed documents. ``padded``: each step of
a plain GRPO or SFT loop as a function, as papers and exercises write it. ``as_published``: LUFFY's loss
and ExGRPO's draws as their code has them. ``returns``: GAE and rewards of single tokens, for a critic.
"""
