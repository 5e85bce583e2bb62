"""A user's class that bounds stale tokens by itself; test_updates.py shows that it may have them."""

from torch import Tensor

from tandem.learner.objectives import Reinforce
from tandem.learner.rows.rows import Rows


class Capped(Reinforce):
    def own_losses(
        self, rows: Rows, logprobs: Tensor, behaviour: Tensor, advantages: Tensor, own: Tensor
    ) -> Tensor:
        return -advantages * (logprobs - behaviour).exp().clamp(max=1.0)
