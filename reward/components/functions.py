"""Reward functions of a user's own, named by import path and called in a grader process.

The form is TRL's, so that a function written for its trainers works here unchanged::

    def shorter(completions: list[str], **columns) -> list[float | None]:
        return [-len(text) / 1000 for text in completions]

Named in the config as ``reward.components=[{name: "my_rewards:shorter"}]``; the module is
installed, on ``PYTHONPATH``, or in the folder where Tandem was started. It is imported once, in
the graders' parent. A call gets the completions of one whole group. All arguments are keywords;
a function without ``**columns`` gets those that it names:

=====================  ========================================================================
``completions``        ``[G]`` the responses
``prompts``            ``[G]`` the rendered prompts
``completion_ids``     ``[G][L]`` token ids, where they are known
``gold``               ``[G]`` the gold answer; also as ``ground_truth`` and ``solution``
``data_source``        ``[G]`` the data set's name for where the row is from
``verdict``            ``[G]`` what the grader found: ``correct``, ``wrong``, …
``extracted``          ``[G]`` the answer that was read, or None
``finish_reason``      ``[G]`` ``stop``, ``length`` or ``deadline``
any key of ``extra``   ``[G]`` the data set's own columns
any of ``params``      as the config has it
=====================  ========================================================================

It returns a number for every completion, or None where it has nothing to say of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...common.errors import ConfigError
from .registry import Graded

RESERVED = frozenset({"completions", "prompts", "completion_ids"})
"""Columns that no column of a data set and no parameter may replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One function as a component of the reward."""

    path: str
    """``package.module:function``."""
    index: int
    """Place among the functions that the graders have imported."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments besides the columns."""

    def payload(self, samples: Sequence[Graded]) -> list[Any]:
        """What a grader is sent for these samples."""
        return [self.index, columns(samples) | dict(self.params)]


def check_params(path: str, params: Mapping[str, Any]) -> None:
    """Refuses parameters that would hide a column.

    Raises:
        ConfigError: one is named like a column that every call has.
    """
    taken = sorted(set(params) & RESERVED)
    if taken:
        raise ConfigError(
            f"reward component {path}: params.{taken[0]} has the name of a column that every call "
            f"gets; rename it"
        )


def columns(samples: Sequence[Graded]) -> dict[str, Any]:
    """Keyword arguments of a call for these samples."""
    golds = [sample.gold for sample in samples]
    found: dict[str, Any] = {
        "gold": golds,
        "ground_truth": golds,
        "solution": golds,
        "data_source": [sample.data_source for sample in samples],
        "verdict": [sample.verdict.value for sample in samples],
        "extracted": [sample.extracted for sample in samples],
        "finish_reason": [sample.finish_reason.value for sample in samples],
    }
    for name in dict.fromkeys(name for sample in samples for name in sample.extra):
        found[name] = [sample.extra.get(name) for sample in samples]
    found["completions"] = [sample.text for sample in samples]
    found["prompts"] = [sample.prompt_text for sample in samples]
    found.pop("completion_ids", None)
    tokens = [sample.tokens for sample in samples if sample.tokens is not None]
    if len(tokens) == len(samples):
        found["completion_ids"] = [ids.tolist() for ids in tokens]
    return found
