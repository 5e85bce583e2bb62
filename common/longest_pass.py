"""The largest micro-batch that a config permits, and whether an update has others besides."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config
from .config.groups import longest_row, rows_of_group


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestPass:
    """Rows of one forward and backward pass, all of one length.

    >>> LongestPass(rows=6, groups=2, prompt=10, response=5, alone=True).tokens
    84
    """

    rows: int
    """Number of rows."""
    groups: int
    """Number of groups that they are of; the rows of a group have one prompt."""
    prompt: int
    """Tokens of each prompt."""
    response: int
    """Tokens of each response, which get log-probs."""
    alone: bool
    """Whether it is all that a rank has in an update. Otherwise the gradients of another pass are there already
    when its activations are."""

    @property
    def width(self) -> int:
        """Tokens of a row that are read: all but the last."""
        return self.prompt + self.response - 1

    @property
    def tokens(self) -> int:
        """Tokens that are read, with a prompt in each row."""
        return self.rows * self.width

    @property
    def line(self) -> int:
        """Tokens that are read if each group's prompt is read once."""
        return self.groups * self.prompt + self.rows * (self.response - 1)


def longest_pass(config: Config) -> LongestPass:
    """The rows that fill the budget of a micro-batch: as long as the config permits, and no longer than lets
    whole rows fill it; no more than a rank's share of an update."""
    learner, longest = config.learner, longest_row(config)
    of_group = rows_of_group(config)
    share = -(-of_group * config.replay.groups_per_step // (learner.minibatches * learner.ranks))
    rows = max(1, min(-(-learner.micro_batch_tokens // longest), share))
    width = min(longest, learner.micro_batch_tokens // rows)
    prompt = max(1, min(config.data.max_prompt_tokens, width))
    return LongestPass(
        rows=rows,
        groups=-(-rows // of_group),
        prompt=prompt,
        response=width + 1 - prompt,
        alone=rows >= share,
    )


def alone(config: Config) -> Config:
    """The config of one rank that makes one update a step."""
    learner = config.learner.model_copy(update={"ranks": 1, "minibatches": 1, "update_epochs": 1})
    return config.model_copy(update={"learner": learner})
