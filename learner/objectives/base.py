"""The contract of an objective, and the registry.

An :class:`Objective` is a pure function of tensors in two parts. ``statistics`` sums what the
denominators need, over all rows of an update, without gradient. ``loss`` returns the contribution of
some of the rows, so that the parts of any split add up to the same loss and gradient. A split never
goes through a ``unit``.

A new objective is a function or class with a ``@register("name")`` and an entry in
:mod:`tandem.common.objectives`; a user's own is named in the config by its import path,
``package.module:function`` or ``package.module:Class``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, make_dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...common.errors import ConfigError
from ...common.import_path import check_call, load
from ...common.objectives import (
    OBJECTIVES,
    ObjectiveConfig,
    OwnObjective,
    check_name,
    kind_of,
    reads,
)
from ...common.objectives.keys import Entropy
from ..losses.aggregation import counts
from ..losses.finite import finite
from ..rows.rows import Rows

Column = Literal["behaviour", "proximal", "reference", "divergence", "values", "current"]
"""Columns that the trainer fills in besides the rows themselves; ``current`` means that
``statistics`` needs ``rows.logprobs`` (one pass without gradient)."""
Unit = Literal["row", "pair", "group"]
Sums = dict[str, Tensor]
"""Detached sums for the metrics, additive over units."""


class Objective(ABC):
    """One training objective; see the module."""

    unit: ClassVar[Unit] = "row"
    """The unit that no micro-batch, mini-batch or rank splits."""
    columns: frozenset[Column] = frozenset({"behaviour"})
    """Columns that the trainer has to fill in."""
    mismatched: ClassVar[bool] = False
    """Whether updates without own samples measure the gain of prompts with other prompts' responses:
    ``mismatched_gain``, Σ log π_θ/π_ref over their tokens, and ``mismatched_rows`` among the scalars."""
    clips_own: ClassVar[bool] = False
    """Whether a clip may decide about own tokens, see :meth:`clipped`."""
    plain_temperature: ClassVar[frozenset[Literal["own", "expert"]]] = frozenset()
    """Sources whose tokens are scored at temperature 1 rather than at the sample's (SFT,
    preference losses)."""
    kind: ClassVar[type[ObjectiveConfig]] = OwnObjective
    """Class of the settings that a built-in name reads."""
    expert_negative: bool = False
    """Whether expert tokens with A < 0 stay in the loss: ``expert.negative``."""

    def __init__(self, settings: ObjectiveConfig) -> None:
        self.settings = settings

    @property
    def needs_entropy(self) -> bool:
        """Whether ``rows.entropy`` must carry a gradient."""
        settings = self.settings
        if not isinstance(settings, Entropy):
            return False
        # A stepped coefficient may begin at 0.
        stepped = settings.entropy_target is not None and settings.entropy_adapt == "stepped"
        return settings.entropy_coefficient != 0 or stepped

    def active(self, rows: Rows) -> Tensor:
        """``[R]`` bool: rows that can move the gradient. The others need no forward pass, but still
        count in ``statistics``."""
        return torch.ones(rows.count, dtype=torch.bool, device=rows.advantages.device)

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        """Scalars that are summed over all rows of the update and then passed to every loss.

        Additive over units; float64; no gradient.
        """
        return counts(rows.row, rows.expert, rows.count)

    @abstractmethod
    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        """The contribution of these rows to the update's loss, and sums for the metrics.

        Args:
            rows: whole units, with ``logprobs`` filled in.
            scalars: the sums of :meth:`statistics` over the update; ``width``: configured response
                length; ``constant``: that × nominal rows of the update; ``step``: step of the ledger,
                from 1; ``entropy_coefficient`` and ``kl_coefficient`` if they have moved.

        Returns:
            A scalar with gradient, additive over units, and detached sums, also additive.

        Raises:
            NonFiniteError: a log-prob that counts is infinite or NaN.
        """

    def clipped(self, rows: Rows, log_ratios: Tensor) -> Tensor:
        """``[N]`` bool: tokens for which a clip decides, on whatever ratio it bounds.

        Args:
            rows: rows without ``logprobs``, with the columns that the loss asks for.
            log_ratios: ``[N]`` log π_θ/μ.
        """
        return torch.zeros_like(rows.expert)

    def report(self, sums: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
        """Metrics of an update from the sums of its losses."""
        return dict(sums)


def where(mask: Tensor, values: Tensor) -> Tensor:
    """The values where the mask is on, else 0, with no gradient and no NaN from the others."""
    return torch.where(mask, values, torch.zeros_like(values))


def scored(rows: Rows, mask: Tensor) -> Tensor:
    """``[N]`` log π_θ of the tokens in the mask, 0 elsewhere.

    Raises:
        NonFiniteError: one of them is infinite or NaN.
    """
    if rows.logprobs is None:
        raise ConfigError("the loss needs rows.logprobs: score the rows first")
    return finite("rows.logprobs", where(mask, rows.logprobs))


LossFunction = Callable[[Rows, Mapping[str, float], OwnObjective], "Tensor | tuple[Tensor, Sums]"]
"""A user's objective in its shortest form."""


class FunctionObjective(Objective):
    """An objective that is one function ``loss(rows, scalars, settings)``.

    Attributes of the function with the same names as the class's (``unit``, ``columns``,
    ``plain_temperature``, ``statistics(rows)``) are adopted.
    """

    def __init__(self, settings: ObjectiveConfig, function: Any) -> None:
        super().__init__(settings)
        self.function = function
        self.columns = frozenset(getattr(function, "columns", {"behaviour"}))
        self._statistics = getattr(function, "statistics", None)
        # Set on the instance, since every function has its own.
        for name in ("unit", "plain_temperature"):
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    def statistics(self, rows: Rows) -> dict[str, Tensor]:
        sums = super().statistics(rows)
        return sums if self._statistics is None else sums | self._statistics(rows)

    def loss(self, rows: Rows, scalars: Mapping[str, float]) -> tuple[Tensor, Sums]:
        result = self.function(rows, scalars, self.settings)
        return result if isinstance(result, tuple) else (result, {})


REGISTRY: dict[str, Any] = {}
"""Name to subclass of :class:`Objective`, or to a :data:`LossFunction`."""


def register(name: str) -> Callable[[Any], Any]:
    """Decorator that gives a class or function its name in the config."""

    def add(entry: Any) -> Any:
        if name not in OBJECTIVES:
            raise ValueError(f"{name} isn't a name of common/objectives")
        if REGISTRY.setdefault(name, entry) is not entry:
            raise ValueError(f"{name} is already the name of another objective")
        if isinstance(entry, type) and issubclass(entry, Objective):
            entry.kind = OBJECTIVES[name]
        return entry

    return add


def make(
    name: str,
    settings: ObjectiveConfig | None = None,
    *,
    expert_negative: bool = False,
    **changes: Any,
) -> Objective:
    """The objective with that name, or at that import path.

    Args:
        name: a built-in name, or an import path.
        settings: the keys that it reads; None = those of the name, with the changes.
        expert_negative: see :attr:`Objective.expert_negative`.
        changes: keys whose values differ from the name's own.

    Raises:
        ConfigError: there is none.
    """
    if settings is None:
        settings = kind_of(name)(name=name, **changes)
    entry = REGISTRY.get(name)
    if entry is None:
        entry = imported(name)
    made: Objective
    if isinstance(entry, type):
        made = entry(_settings_of(entry, settings))
    else:
        made = FunctionObjective(settings, entry)
    made.expert_negative = expert_negative
    return made


def _settings_of(kind: type[Objective], settings: ObjectiveConfig) -> ObjectiveConfig:
    """The settings of a user's class that derives from a built-in one: it also reads the built-in one's
    keys, which are in ``params``, and what isn't given has the built-in one's default."""
    if not isinstance(settings, OwnObjective) or kind.kind is OwnObjective:
        return settings
    both = make_dataclass("Derived", (), bases=(kind.kind, OwnObjective), frozen=True, kw_only=True)
    # A config is kept with all of its keys, so that only their values can tell which were given.
    plain = OwnObjective()
    values = {one.name: getattr(settings, one.name) for one in fields(settings)}
    given = {key: value for key, value in values.items() if value != getattr(plain, key)}
    chosen = {key: settings.params[key] for key in reads(kind.kind) if key in settings.params}
    derived: ObjectiveConfig = both(**given | _checked(kind.kind, given, chosen))
    return derived


def _checked(
    kind: type[ObjectiveConfig], given: Mapping[str, Any], chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Values of a built-in objective's keys as the config would have them, which doesn't know whose keys ``params`` are.

    Args:
        kind: the built-in objective's settings.
        given: the objective's other settings.
        chosen: those among ``params``.

    Raises:
        ConfigError: one is out of its key's bounds, none of its values, or doesn't go with the others.
    """
    # Loaded already where there is a config.
    from pydantic import TypeAdapter, ValidationError

    try:
        known = {key: given[key] for key in reads(kind) if key in given and key != "name"}
        valid = TypeAdapter(kind).validate_python({**known, **chosen})
    except ValidationError as error:
        problem = error.errors()[0]
        at = "".join(f".{key}={chosen.get(str(key))!r}" for key in problem["loc"][:1])
        message = str(problem.get("ctx", {}).get("error", problem["msg"]))
        said = f"learner.objective.params{at}: {message[0].lower()}{message[1:]}"
        raise ConfigError(said) from None
    return {key: getattr(valid, key) for key in chosen}


def imported(path: str) -> Any:
    """The subclass of :class:`Objective` or the function that a config names by its import path.

    Raises:
        ConfigError: there is none, it can't be called as a loss is, or its module can't be imported.
    """
    check_name(path)
    named = f"learner.objective.name={path!r}"
    found = load(path, key="learner.objective.name")
    if isinstance(found, type):
        if issubclass(found, Objective):
            return found
    elif callable(found):
        check_call(found, named, "(rows, scalars, settings)", None, None, None)
        return found
    raise ConfigError(
        f"{named} is neither a subclass of Objective nor a function loss(rows, scalars, settings)"
    )
