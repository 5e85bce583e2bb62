"""Composes the reward of one sample from its components: weights, gates and exceptions.

In this order:

1. ``own_reward`` set: that constant, whatever was found (the components are still recorded).
2. Verdict ``crashed`` or ``gold_unparsable``: no reward (None) where a component that pays or
   gates needs the verdict. The failure isn't the text's own, so it is never a zero.
3. Verdict ``timeout`` or ``memory``: ``timeout_pays``.
4. A gate that isn't above ``gate_above``: 0.
5. The weighted sum of the components that have a value.
"""

from __future__ import annotations

from ..common.config import RewardConfig
from ..common.errors import ConfigError
from ..common.records import Verdict
from .components import Component, Graded, component

_OWN_FAILURES = (Verdict.TIMEOUT, Verdict.MEMORY)


class Scorer:
    """The reward of a config: built once, then called per sample.

    Raises:
        ConfigError: a component that isn't there, or two under one name.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._own = config.own_reward
        self._timeout_pays = config.timeout_pays
        self._parts: list[tuple[str, Component, float, bool, float]] = []
        self._needs_verdict = False
        for part in config.components:
            kind, function = component(part.name, part.params)
            if any(name == part.name for name, *_ in self._parts):
                raise ConfigError(f"reward.components names {part.name} twice")
            self._parts.append((part.name, function, part.weight, part.gate, part.gate_above))
            if kind.needs_verdict and (part.gate or part.weight):
                self._needs_verdict = True

    def score(self, sample: Graded) -> tuple[float | None, dict[str, float | None]]:
        """(reward, every component by name, unweighted)."""
        values: dict[str, float | None] = {}
        total = 0.0
        closed = False
        for name, function, weight, gate, above in self._parts:
            value = function(sample)
            values[name] = value
            if gate and (value is None or value <= above):
                closed = True
            if value is not None:
                total += weight * value
        if self._own is not None:
            return self._own, values
        if sample.verdict.leaves_baseline and self._needs_verdict:
            return None, values
        if sample.verdict in _OWN_FAILURES:
            return self._timeout_pays, values
        return (0.0 if closed else total), values
