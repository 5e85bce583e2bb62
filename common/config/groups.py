"""What the groups of a run hold, by its config: rows, tokens and bytes."""

from __future__ import annotations

from ..objectives.experts import ExGrpo
from .tree import Config

LEASES_STOP_SHARE = 0.75
"""Share of ``replay.maxmemory_mb`` that leases may fill, counting the worst case of those that are out."""


def group_bytes(config: Config, problem_bytes: int = 0) -> int:
    """Worst case of one group's payload in bytes: per response token 4 for its id, 4 for its log-prob, 4 for
    its reward, 1 for its source, and about 6 of text; and its problem, of which only the data tell the size: a
    test of code, say, may be of megabytes.

    Args:
        config: the run's config.
        problem_bytes: of the largest problem; where it isn't known, the longest prompt with 10 bytes a token counts.
    """
    response = 19 * config.rollout.max_new_tokens
    problem = max(problem_bytes, 10 * config.data.max_prompt_tokens)
    return config.rollout.group_size * response + problem


def own_rows(config: Config) -> int:
    """Least number of own samples that a worker is asked for in a group. Traces that enter after grading,
    or that samples only begin with, don't reduce it."""
    expert = config.expert
    instead = expert.prefix is None and expert.when == "always"
    return config.rollout.group_size - (expert.per_group if instead else 0)


def longest_row(config: Config) -> int:
    """Tokens that the forward pass of the longest possible row reads: prompt and response without the
    last token, after which nothing is predicted. Traces over the limits are left out at ingest."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens - 1


def rows_of_group(config: Config) -> int:
    """Number of rows of a whole group; of stored responses to one question, there may be two."""
    if has_groups(config):
        return config.rollout.group_size
    return 2 if config.learner.objective.rejects else 1


def has_groups(config: Config) -> bool:
    """Whether steps have groups of own samples."""
    return is_online(config) or config.data.archive is not None


def is_online(config: Config) -> bool:
    """Whether rollout workers sample what is trained on."""
    return config.learner.source == "ledger"


def replays_own(config: Config) -> bool:
    """Whether own past successes come back as rows of groups, in the places of expert traces."""
    return isinstance(config.learner.objective, ExGrpo) and is_online(config)
