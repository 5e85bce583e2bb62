"""The rows of a micro-batch as tensors: what an objective sees.

Tokens of all rows lie in one flat vector, without padding, so nothing can leak from it. Only
own and expert tokens are there; environment text is context of the forward pass and nothing
else.

Example: two rows of 2 and 3 tokens, the second an expert's::

    row        = [0, 0, 1, 1, 1]
    expert     = [F, F, T, T, T]
    behaviour  = [-0.3, -0.1, 0, 0, 0]      (log π_φ = 0 where it isn't known)
    advantages = [-0.5, 0.5]
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """R rows with N own and expert tokens in all."""

    row: Tensor
    """``[N]`` int64, which row a token is of, ascending."""
    expert: Tensor
    """``[N]`` bool, True for expert tokens, False for own ones."""
    position: Tensor
    """``[N]`` int64, the token's place in its response."""
    behaviour: Tensor
    """``[N]`` nats: log μ of own tokens, log π_φ of expert tokens, 0 where that isn't known."""
    known: Tensor
    """``[N]`` bool, whether ``behaviour`` was recorded."""
    lag: Tensor
    """``[N]`` int64, steps between the version that sampled an own token and the learner's;
    −1 for expert tokens."""
    temperature: Tensor
    """``[N]`` what divides the logits."""
    advantages: Tensor
    """``[R]``"""
    rewards: Tensor
    """``[R]``"""
    group: Tensor
    """``[R]`` int64, which group of the mini-batch a row is of."""
    expert_row: Tensor
    """``[R]`` bool, rows with at least one expert token."""
    masked: Tensor
    """``[R]`` bool, rows that count in denominators and stay out of the loss (cut ones)."""
    lengths: Tensor
    """``[R]`` int64, own and expert tokens of the row."""
    logprobs: Tensor | None = None
    """``[N]`` log π_θ, with gradient in a loss; None in statistics that don't ask for it."""
    entropy: Tensor | None = None
    """``[N]`` entropy of π_θ over the whole vocabulary, nats."""
    proximal: Tensor | None = None
    """``[N]`` log π_prox, the weights at the step's start."""
    reference: Tensor | None = None
    """``[N]`` log π_ref."""
    values: Tensor | None = None
    """``[N]`` a critic's values, with gradient in a loss."""
    old_values: Tensor | None = None
    """``[N]`` a critic's values when the rows were collected."""
    returns: Tensor | None = None
    """``[N]`` what the critic learns (:func:`tandem.learner.losses.returns.gae`)."""
    token_advantages: Tensor | None = None
    """``[N]`` in place of the rows' advantages, where tokens have their own."""

    @property
    def count(self) -> int:
        """R."""
        return len(self.advantages)

    def by_token(self, per_row: Tensor) -> Tensor:
        """``[R]`` to ``[N]``: every token gets its row's value."""
        return per_row[self.row]

    def by_row(self, per_token: Tensor) -> Tensor:
        """``[N]`` to ``[R]``: sums over each row's tokens, differentiable."""
        zeros = torch.zeros(self.count, dtype=per_token.dtype, device=per_token.device)
        return zeros.index_add(0, self.row, per_token)

    def with_columns(self, **columns: Tensor | None) -> Rows:
        """A copy with some columns set."""
        return replace(self, **columns)  # type: ignore[arg-type]

    def select(self, which: Tensor) -> Rows:
        """The rows with these indices (``[r]`` int64), in that order, with their tokens."""
        sizes = torch.bincount(self.row, minlength=self.count)
        starts = (sizes.cumsum(0) - sizes)[which]
        sizes = sizes[which]
        ends = sizes.cumsum(0)
        tokens = torch.arange(int(sizes.sum()), device=which.device)
        tokens += torch.repeat_interleave(starts - (ends - sizes), sizes)
        changed: dict[str, Tensor] = {"row": torch.repeat_interleave(sizes)}
        for name in _FIELDS:
            value = getattr(self, name)
            if name != "row" and value is not None:
                changed[name] = value[which if name in PER_ROW else tokens]
        return replace(self, **changed)

    def to(self, device: torch.device) -> Rows:
        """The same on another device; doubles stay doubles."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name in _FIELDS
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)


_FIELDS = tuple(field.name for field in fields(Rows))
PER_ROW = frozenset({"advantages", "rewards", "group", "expert_row", "masked", "lengths"})
"""Fields of :class:`Rows` that have one value a row."""
