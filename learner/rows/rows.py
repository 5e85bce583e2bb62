"""Rows as tensors: the one form in which the learner holds what it trains on.

A row is one prompt with one response: a sample of the policy's own, or an expert's trace. Tokens are
in flat vectors without padding, so that padding can't leak into anything.


There are two kinds of token vectors. ``ids`` is what the policy reads: every prompt and every
response. The columns that an objective sees have an entry only for each own and expert token;
environment text is nothing but context of the forward pass.

Example: two rows with prompts of 3 tokens and responses of 2 and 3, the second an expert's::

    ids        = [p, p, p, a, b, p, p, p, x, y, z]
    row        = [         0, 0,          1, 1, 1]
    position   = [         0, 1,          0, 1, 2]
    expert     = [         F, F,          T, T, T]
    behaviour  = [      -0.3, -0.1,       0, 0, 0]      (log π_φ = 0 where it isn't known)
    advantages = [-0.5, 0.5]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...common.objectives.keys import Baseline
from ..losses.advantages import advantages
from ..losses.returns import last_token_rewards
from ..losses.turns import turn_advantages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """R rows with N own and expert tokens in all, and S tokens that the policy reads."""

    ids: Tensor
    """``[S]`` int64, prompt and response of every row, one row after the other."""
    prompt_lengths: Tensor
    """``[R]`` int64, at least 1."""
    response_lengths: Tensor
    """``[R]`` int64, environment text included."""
    row: Tensor
    """``[N]`` int64, index of each token's row, ascending."""
    position: Tensor
    """``[N]`` int64, the token's place in its response."""
    expert: Tensor
    """``[N]`` bool, True for expert tokens, False for own ones."""
    behaviour: Tensor
    """``[N]`` nats: log μ of own tokens, log π_φ of expert tokens, 0 if that isn't known."""
    known: Tensor
    """``[N]`` bool, whether ``behaviour`` was recorded."""
    lag: Tensor
    """``[N]`` int64, steps between the version that sampled an own token and the learner's;
    −1 for expert tokens."""
    temperature: Tensor
    """``[N]`` divisor of the logits."""
    advantages: Tensor
    """``[R]`` advantages."""
    rewards: Tensor
    """``[R]`` float64, as the graders gave them; those of single tokens included."""
    group: Tensor
    """``[R]`` int64, index of each row's group in the mini-batch."""
    expert_row: Tensor
    """``[R]`` bool, rows with at least one expert token."""
    masked: Tensor
    """``[R]`` bool, rows that count in denominators and stay out of the loss (cut ones)."""
    silent: Tensor
    """``[R]`` bool, rows whose advantage is 0 whatever their reward, and from which terms without an advantage
    don't learn either (cut ones)."""
    lengths: Tensor
    """``[R]`` int64, own and expert tokens of the row."""
    turn: Tensor
    """``[N]`` int32, number of the episode's turn that the token belongs to, from 0; 0 in rows that aren't episodes."""
    muted: Tensor
    """``[N]`` bool, tokens that count in denominators and stay out of the loss (turns with a malformed call)."""
    groups: int
    """Number of groups of the step; a group may have no row left."""
    logprobs: Tensor | None = None
    """``[N]`` log π_θ, with gradient in a loss; None in statistics that don't ask for it."""
    entropy: Tensor | None = None
    """``[N]`` entropy of π_θ over the whole vocabulary, nats."""
    proximal: Tensor | None = None
    """``[N]`` log π_prox, of the weights at the step's start."""
    reference: Tensor | None = None
    """``[N]`` log π_ref."""
    divergence: Tensor | None = None
    """``[N]`` divergence of the teacher's and π_θ's next tokens over the whole vocabulary, nats, with gradient."""
    values: Tensor | None = None
    """``[N]`` a critic's values, with gradient in a loss."""
    old_values: Tensor | None = None
    """``[N]`` a critic's values when the rows were collected."""
    returns: Tensor | None = None
    """``[N]`` targets of the critic (:func:`tandem.learner.losses.returns.gae`)."""
    token_rewards: Tensor | None = None
    """``[N]`` float64, the part of the rows' rewards that single tokens have earned along the way."""
    token_advantages: Tensor | None = None
    """``[N]`` advantages of single tokens, used in place of the rows' if they are given."""

    @property
    def count(self) -> int:
        """Number of rows, R."""
        return len(self.advantages)

    @property
    def forward_lengths(self) -> Tensor:
        """``[R]`` int64, tokens that a forward pass of the row reads: all but the last."""
        return self.prompt_lengths + self.response_lengths - 1

    @property
    def starts(self) -> Tensor:
        """``[R]`` int64, where each row begins in ``ids``."""
        sizes = self.prompt_lengths + self.response_lengths
        return sizes.cumsum(0) - sizes

    @property
    def kept(self) -> Tensor:
        """``[N]`` bool, tokens that may be in a loss: neither muted nor of a masked row."""
        return ~(self.masked[self.row] | self.muted)

    @property
    def teaching(self) -> Tensor:
        """``[R]`` bool, rows from which a term without an advantage may learn: neither masked nor silent."""
        return ~(self.masked | self.silent)

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

    def with_advantages(
        self, rewards: Tensor, baseline: Baseline, turn_discount: float | None = None
    ) -> Rows:
        """A copy with the advantages of these rewards ``[R]``; ``rewards`` stay as they were.

        Args:
            rewards: what the rows are paid; what ``self.rewards`` doesn't have of it is a KL.
            baseline: the baseline.
            turn_discount: γ of the turns' returns, of which tokens then have advantages of their own; None =
                every token has its row's.
        """
        new = advantages(
            rewards,
            self.group,
            self.groups,
            self.expert_row,
            baseline,
            self.lengths,
            graded=self.rewards,
        )
        rows = replace(self, advantages=new.masked_fill(self.silent, 0.0))
        if turn_discount is None:
            return rows
        of_tokens = turn_advantages(
            self.earned(rewards),
            row=self.row,
            turn=self.turn,
            group=self.group,
            groups=self.groups,
            expert_row=self.expert_row,
            baseline=baseline,
            discount=turn_discount,
            graded=self.earned(self.rewards),
        )
        return replace(rows, token_advantages=of_tokens.masked_fill(self.silent[self.row], 0.0))

    def earned(self, rewards: Tensor) -> Tensor:
        """``[N]`` these rewards ``[R]``, token by token: what tokens have earned along the way is theirs, and the
        last one of each row gets the rest."""
        if self.token_rewards is None:
            return last_token_rewards(rewards, self.row)
        along = self.by_row(self.token_rewards)
        return last_token_rewards(rewards - along, self.row) + self.token_rewards

    def select(self, which: Tensor) -> Rows:
        """The rows with these indices (``[r]`` int64), in that order, with their tokens."""
        sizes = self.lengths
        tokens = ragged((sizes.cumsum(0) - sizes)[which], sizes[which])
        places = {
            "ids": ragged(self.starts[which], (self.prompt_lengths + self.response_lengths)[which]),
            **dict.fromkeys(PER_ROW, which),
        }
        changed: dict[str, Any] = {
            name: value.index_select(0, places.get(name, tokens)) for name, value in self.tensors()
        }
        changed["row"] = torch.repeat_interleave(sizes[which])
        return replace(self, **changed)

    def mismatched(self) -> Rows | None:
        """Every prompt with another prompt's response; None if all rows have one prompt.

        Rows are taken group by group, first each group's first row, then each group's second, and so on; each
        gets the response of the last one before it that has another prompt; before the first comes the last one.
        """
        spans = zip(self.starts.tolist(), self.prompt_lengths.tolist(), strict=True)
        prompts = [self.ids[first : first + length].numpy().tobytes() for first, length in spans]
        if len(set(prompts)) < 2:
            return None
        place = torch.arange(self.count)
        place = place - torch.searchsorted(self.group, self.group)
        order = torch.argsort(place * (int(self.group.max()) + 1) + self.group).tolist()
        partner = torch.zeros(self.count, dtype=torch.int64)
        before = unlike = order[-1]
        # Twice around, since the first time not all is known that comes before the first ones.
        for row in order + order:
            if prompts[row] != prompts[before]:
                unlike = before
            partner[row] = unlike
            before = row
        other = self.select(partner)
        starts = (self.prompt_lengths + other.response_lengths).cumsum(0)
        starts -= self.prompt_lengths + other.response_lengths
        ids = torch.empty(
            int((self.prompt_lengths + other.response_lengths).sum()), dtype=torch.int64
        )
        ids[ragged(starts, self.prompt_lengths)] = self.ids[
            ragged(self.starts, self.prompt_lengths)
        ]
        ids[ragged(starts + self.prompt_lengths, other.response_lengths)] = other.ids[
            ragged(other.starts + other.prompt_lengths, other.response_lengths)
        ]
        return replace(
            other,
            ids=ids,
            prompt_lengths=self.prompt_lengths,
            group=self.group,
            reference=None,
        )

    def to(self, device: torch.device) -> Rows:
        """The same on another device; doubles stay doubles."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in self.tensors()
        }
        return replace(self, **moved)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every column that is set."""
        for name in _TENSORS:
            if (value := getattr(self, name)) is not None:
                yield name, value


_TENSORS = tuple(field.name for field in fields(Rows) if field.name != "groups")
PER_ROW = frozenset(
    {
        *("prompt_lengths", "response_lengths", "advantages", "rewards", "group"),
        *("expert_row", "masked", "silent", "lengths"),
    }
)
"""Fields of :class:`Rows` that have one value per row."""


def ragged(starts: Tensor, lengths: Tensor) -> Tensor:
    """``[sum(lengths)]`` the indices ``start, start + 1, …`` of every span, one after the other.

    >>> ragged(torch.tensor([4, 9]), torch.tensor([2, 3])).tolist()
    [4, 5, 9, 10, 11]
    """
    ends = lengths.cumsum(0)
    offsets = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return offsets + torch.arange(len(offsets), device=lengths.device)
