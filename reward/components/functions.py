"""Reward functions of a user's own, named by import path and called in a grader process.

They have the form of TRL's, so that a function written for its trainers works here unchanged::

    def shorter(completions: list[str], **columns) -> list[float | None]:
        return [-len(text) / 1000 for text in completions]


    def formatted(completions, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [float(text.startswith("<think>")) for text in contents]

The config names them as ``reward.components=[{name: "my_rewards:shorter"}]``; the module must be
installed, on ``PYTHONPATH``, or in the folder where Tandem was started. It is imported once, in
the graders' parent. A call gets the completions of one whole group. All arguments are keywords;
a function without ``**columns`` gets only those that it names:

=====================  ========================================================================
``completions``        ``[G]`` the responses: texts, or conversations of one message of the
                       assistant (:mod:`tandem.reward.graders.call_forms` has the rule)
``prompts``            ``[G]`` the rendered prompts, or their messages
``completion_ids``     ``[G][L]`` token ids, if they are known
``gold``               ``[G]`` the gold answer; also as ``ground_truth`` and ``solution``
``data_source``        ``[G]`` the data set's name for where the row is from
``verdict``            ``[G]`` the grader's verdict, or that of the row's tests: ``correct``, ``wrong``, …
``extracted``          ``[G]`` the answer that was read, the program that was run, or None
``finish_reason``      ``[G]`` ``stop``, ``length`` or ``deadline``
``log_extra``,         functions that do nothing, for a function that can't be called without them
``log_metric``
any key of ``extra``   ``[G]`` the data set's own columns; integers beyond 64 bits are texts
any of ``params``      as the config has it
=====================  ========================================================================

It returns a number for every completion, or None for one that it doesn't judge; as a list, or as an
array or tensor, in which NaN means None. In place of a number it may return a list with one for each
token of ``completion_ids``: the component's value is their sum, and ``ppo`` credits each token with its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...common.errors import ConfigError
from ...common.records import PROMPT_MESSAGES
from .registry import Graded

RESERVED = frozenset(
    {"completions", "prompts", "completion_ids", "verdict", "extracted", "finish_reason"}
)
"""Columns that no column of a data set and no parameter may replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One function as a component of the reward."""

    path: str
    """``package.module:function``."""
    index: int
    """Index among the functions that the graders have imported."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments in addition to the columns."""
    form: str = "auto"
    """``reward.components.form``."""

    def payload(self, samples: Sequence[Graded]) -> list[Any]:
        """The request for a grader with these samples."""
        prompts = [] if self.form == "text" else [sample.messages for sample in samples]
        return [self.index, columns(samples) | dict(self.params), self.form, prompts]


def check_params(path: str, params: Mapping[str, Any]) -> None:
    """Refuses parameters that would hide a column.

    Raises:
        ConfigError: a parameter has the name of a column that every call gets.
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
    arguments: dict[str, Any] = {
        "gold": golds,
        "ground_truth": golds,
        "solution": golds,
        "data_source": [sample.data_source for sample in samples],
    }
    for name in dict.fromkeys(name for sample in samples for name in sample.extra):
        if name == PROMPT_MESSAGES:
            continue  # A function that gets conversations has them as its prompts.
        arguments[name] = [sample.extra.get(name) for sample in samples]
    arguments["verdict"] = [sample.verdict.value for sample in samples]
    arguments["extracted"] = [sample.extracted for sample in samples]
    arguments["finish_reason"] = [sample.finish_reason.value for sample in samples]
    arguments["completions"] = [sample.text for sample in samples]
    arguments["prompts"] = [sample.prompt_text for sample in samples]
    arguments.pop("completion_ids", None)
    tokens = [sample.tokens for sample in samples if sample.tokens is not None]
    if len(tokens) == len(samples):
        arguments["completion_ids"] = [ids.tolist() for ids in tokens]
    return arguments
