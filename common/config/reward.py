"""``reward``: the pool of graders and its rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from .section import NonNegative, Positive, Seconds, Section


class ComponentConfig(Section):
    """One reward component."""

    name: str
    """Name in the registry of :mod:`tandem.reward.components`, or a function's import path."""
    weight: float = 1.0
    """Factor in the sum; 0 only records the component."""
    gate: bool = False
    """Whether the whole reward is 0 unless this component is above ``gate_above``."""
    gate_above: float = 0.0
    """Threshold of the gate."""
    params: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the component."""
    scope: Literal["sample", "group"] = "sample"
    """For a function of your own, which is called with a whole group. ``sample``: each completion's
    value depends on that completion only, so that after a call that hung or raised each is tried
    alone. ``group``: it compares completions, so that such a call fails for the whole group."""
    deadline_seconds: Seconds | None = None
    """Deadline of one call of a function of your own; null = ``reward.deadline_seconds``."""
    form: Literal["auto", "text", "conversation"] = "auto"
    """What a function of your own gets as prompts and completions. ``text``: texts. ``conversation``:
    lists of messages, ``[{"role": …, "content": …}]``. ``auto``: what the function is written for, by the
    annotation of ``completions``, or else by whether its code reads the key ``"content"``."""


class RewardConfig(Section):
    """The reward pool."""

    pools: NonNegative = 1
    """Number of pools that ``start_all.sh`` starts."""
    graders: Positive = 2
    """Number of grader processes per pool; half as many more stand in while slow texts hold them."""
    mode: str = "boxed"
    """How an answer is read and compared: a name in :mod:`tandem.reward.reading.modes`."""
    tuple_for_set: bool = True
    """Whether an ordered tuple, ``(1,2)``, is accepted for a set in braces, ``\\{1,2\\}``."""
    deadline_seconds: Seconds = 3.0
    """A grader that takes longer is killed, and its text gets the verdict ``timeout``. The deadline is
    extended while other processes keep the grader from its core (docs/grading.md)."""
    memory_mb: Positive = 1024
    """Address-space limit of a grader, MiB."""
    timeout_pays: float = 0.0
    """Reward for the verdicts ``timeout`` and ``memory``, which are the text's own doing."""
    components: tuple[ComponentConfig, ...] = (
        ComponentConfig(name="accuracy"),
        ComponentConfig(name="format", weight=0.0),
    )
    """The reward is the weighted sum of these, after the gates."""
    own_reward: float | None = None
    """Reward of every own sample in place of the computed one (a control: what does reinforcement add?)."""
