"""``reward``: the pool of graders and what it pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from .section import NonNegative, Positive, Seconds, Section


class ComponentConfig(Section):
    """One reward component."""

    name: str
    """In the registry of :mod:`tandem.reward.components`, or a function's import path."""
    weight: float = 1.0
    """Factor in the sum; 0 records the component without paying it."""
    gate: bool = False
    """The whole reward is 0 where this component isn't above ``gate_above``."""
    gate_above: float = 0.0
    """See ``gate``."""
    params: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the component."""
    scope: Literal["sample", "group"] = "sample"
    """Of a function of your own, which is called with a whole group: ``sample`` says that each
    completion's value is its own affair, so that after a call that hung or raised each is tried
    alone; ``group`` that it compares them, so that such a call is the whole group's failure."""
    deadline_seconds: Seconds | None = None
    """Of one call of a function of your own; null = ``reward.deadline_seconds``."""


class RewardConfig(Section):
    """The reward pool."""

    pools: NonNegative = 1
    """Processes that ``start_all.sh`` starts."""
    graders: Positive = 2
    """Grader processes of one pool; half as many more stand in while slow texts hold them."""
    mode: str = "boxed"
    """How an answer is read and compared: a name in :mod:`tandem.reward.reading.modes`."""
    tuple_for_set: bool = True
    """Whether an ordered tuple, ``(1,2)``, is right for a set in braces, ``\\{1,2\\}``, in its order."""
    deadline_seconds: Seconds = 3.0
    """A grader past this is killed and its text gets the verdict ``timeout``; put off while other
    processes keep the grader from its core (docs/grading.md)."""
    memory_mb: Positive = 1024
    """Address-space limit of a grader."""
    timeout_pays: float = 0.0
    """Reward of the verdicts ``timeout`` and ``memory``, which are the text's own doing."""
    components: tuple[ComponentConfig, ...] = (
        ComponentConfig(name="accuracy"),
        ComponentConfig(name="format", weight=0.0),
    )
    """The reward is the weighted sum of these, after the gates."""
    own_reward: float | None = None
    """Pays every own sample this instead (a control: does reinforcement do the learning?)."""
