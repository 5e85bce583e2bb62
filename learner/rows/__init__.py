"""From the ledger's groups to the tensors that a step is trained on. A step passes each file once:

``sources``: the ledger's row of a step, or stored traces, as :class:`~.groups.MixedGroup`.
``groups``: its groups as :class:`~.rows.Rows`, advantages among the columns.
``rows``: that shape, which every later file and every objective sees.
``packing``: which rows make which micro-batch on which rank.
``microbatch``: rows, and their tokens laid out for one forward pass.
"""
