"""Composes the reward of one sample from its components: weights, gates and exceptions.

The first rule that applies decides:

1. ``own_reward`` is set: that constant, whatever the verdict (the components are still recorded).
2. The verdict is ``crashed`` or ``gold_unparsable``: no reward (None) if a component that pays or
   gates needs the verdict; likewise if such a component itself crashed. The failure isn't the
   text's own, so it never earns a zero.
3. The verdict is ``timeout`` or ``memory`` and a component that pays or gates needs it, or such a
   component itself ended that way: ``timeout_pays``.
4. A gate isn't above ``gate_above``: 0.
5. The weighted sum of the components that have a value; None if no component that pays has one, or if
   float32, in which rewards are trained on, can't hold the sum, or the part of it that a token has earned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...common.config import ComponentConfig, RewardConfig
from ...common.errors import ConfigError
from ...common.import_path import is_import_path
from ...common.records import Verdict
from . import functions
from .builtin import Graded, Kind, component
from .functions import FunctionCall
from .registry import Elsewhere

OWN_FAILURES = frozenset({Verdict.TIMEOUT, Verdict.MEMORY})
"""Verdicts for failures that are the text's own doing."""
_LARGEST = float(np.finfo(np.float32).max)
Found = Mapping[str, float | Sequence[float] | None]
"""Values of components that run outside the dispatcher, by name: one number, or ``[L]`` one for each token,
of which the component's value is the sum."""


class Scored(NamedTuple):
    """The reward of one sample."""

    reward: float | None
    """None if there is nothing to reward."""
    components: dict[str, float | None]
    """Every component by name, unweighted."""
    token_rewards: list[float] | None
    """``[L]`` the part of the reward that single tokens have earned; None where no token has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One component of a config."""

    config: ComponentConfig
    """The component's own section of the config."""
    kind: Kind
    """The entry of the registry."""
    function: Any
    """A component, a group component, or the request for one that runs elsewhere."""

    @property
    def name(self) -> str:
        """The name in the config and in stored samples."""
        return self.config.name

    @property
    def matters(self) -> bool:
        """Whether it pays or gates; otherwise it is only recorded."""
        return bool(self.config.weight) or self.config.gate


class Scorer:
    """The reward of a config: built once, then called per sample or per group.

    Raises:
        ConfigError: a component doesn't exist, or two have the same name.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._own = config.own_reward
        self._timeout_pays = config.timeout_pays
        self.parts: list[Part] = []
        """The components, in the config's order."""
        self.functions: list[str] = []
        """Import paths of the user's own functions, in the order of the graders' indices."""
        for part in config.components:
            if any(part.name == other.name for other in self.parts):
                raise ConfigError(f"reward.components names {part.name} twice")
            self.parts.append(self._part(part))
        self.needs_verdict = any(part.kind.needs_verdict and part.matters for part in self.parts)
        """Whether a row without a verdict has no reward."""
        self.outside = [part for part in self.parts if part.kind.place != "dispatcher"]
        """Components whose values come from another process."""
        self.sandboxed = [part for part in self.outside if part.kind.place == "sandbox"]
        """Components that run code."""
        own = [part for part in self.parts if is_import_path(part.name)]
        self.wants_columns = bool(own)
        """Whether a function may ask for any column of the data set."""
        self.remote = [part for part in self.outside if part.kind.place == "remote"]
        """Components that ask a server."""
        self.wants_messages = bool(self.remote) or any(p.config.form != "text" for p in own)
        """Whether a component may ask for the messages that a prompt was rendered from."""

    def _part(self, config: ComponentConfig) -> Part:
        if is_import_path(config.name):
            functions.check_params(config.name, config.params)
            return self._called(config, config.name, config.params)
        if config.form != "auto":
            raise ConfigError(
                f"reward component {config.name}: form={config.form} is for functions of your own, "
                f"and {config.name} is built in: leave it out"
            )
        kind, function = component(config.name, config.params)
        if isinstance(function, Elsewhere):
            alone = config.model_copy(update={"scope": "sample", "form": "text"})
            return self._called(alone, function.path, function.params)
        return Part(config=config, kind=kind, function=function)

    def _called(self, config: ComponentConfig, path: str, params: Mapping[str, Any]) -> Part:
        """A component whose values a grader process computes."""
        call = FunctionCall(
            path=path, index=len(self.functions), params=dict(params), form=config.form
        )
        self.functions.append(path)
        kind = Kind(name=config.name, make=FunctionCall, scope="group", place="grader")
        return Part(config=config, kind=kind, function=call)

    def score(
        self, sample: Graded, found: Found | None = None, failure: Verdict | None = None
    ) -> tuple[float | None, dict[str, float | None]]:
        """(reward, every component by name, unweighted) of a sample that is a group of its own."""
        scored = self.score_group([sample], [found or {}], [failure])[0]
        return scored.reward, scored.components

    def score_group(
        self,
        samples: Sequence[Graded],
        found: Sequence[Found],
        failures: Sequence[Verdict | None],
    ) -> list[Scored]:
        """Rewards of a whole group.

        Args:
            samples: ``[G]`` graded samples.
            found: ``[G]`` values of the components in :attr:`outside`.
            failures: ``[G]`` how such a component that matters failed; None unless one did.
        """
        # Episodes that failed are compared with nothing, so that the others' values don't depend on them.
        alive = [sample for sample in samples if not sample.has_failed]
        of_group: dict[str, list[float | None]] = {}
        for part in self.parts:
            if part.kind.place == "dispatcher" and part.kind.scope == "group":
                values_of = iter(part.function(alive) if alive else ())
                of_group[part.name] = [
                    None if sample.has_failed else next(values_of) for sample in samples
                ]
        scored = []
        for index, sample in enumerate(samples):
            values: dict[str, float | None] = {}
            along: dict[str, Sequence[float]] = {}
            for part in self.parts:
                if part.kind.place != "dispatcher":
                    value = found[index].get(part.name)
                    if isinstance(value, Sequence):
                        along[part.name], value = value, math.fsum(value)
                    values[part.name] = value
                elif part.kind.scope == "group":
                    values[part.name] = of_group[part.name][index]
                else:
                    value = part.function(sample)
                    if isinstance(value, Sequence):
                        along[part.name], value = value, math.fsum(value)
                    values[part.name] = value
            reward, is_sum = self._compose(sample.verdict, values, failures[index])
            earned = self._earned(along) if is_sum else None
            if earned is not None and not all(abs(one) <= _LARGEST for one in earned):
                reward = earned = None
            scored.append(Scored(reward, values, earned))
        return scored

    def _earned(self, along: Mapping[str, Sequence[float]]) -> list[float] | None:
        """``[L]`` weighted sum of what tokens have earned by components that say so; None without any."""
        paying = [
            (part.config.weight, along[part.name]) for part in self.parts if part.name in along
        ]
        if not any(weight for weight, _ in paying):
            return None
        rows = zip(*(values for _, values in paying), strict=True)
        weights = [weight for weight, _ in paying]
        return [
            sum(weight * value for weight, value in zip(weights, row, strict=True)) for row in rows
        ]

    def _compose(
        self, verdict: Verdict, values: Mapping[str, float | None], failure: Verdict | None
    ) -> tuple[float | None, bool]:
        """The reward, and whether it is the weighted sum."""
        if self._own is not None:
            return self._own, False
        if verdict.leaves_baseline and self.needs_verdict:
            return None, False
        if failure is not None and failure.leaves_baseline:
            return None, False
        if (verdict in OWN_FAILURES and self.needs_verdict) or failure in OWN_FAILURES:
            return self._timeout_pays, False
        total, paying, paid, closed = 0.0, False, False, False
        for part in self.parts:
            value, weight = values[part.name], part.config.weight
            if part.config.gate and (value is None or value <= part.config.gate_above):
                closed = True
            paying = paying or bool(weight)
            if value is not None:
                total += weight * value
                paid = paid or bool(weight)
        if closed:
            return 0.0, False
        if (paying and not paid) or not abs(total) <= _LARGEST:
            return None, False
        return total, True
