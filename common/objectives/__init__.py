"""The built-in objectives: the keys that each reads with their defaults, equation, source, when to use it.

Each name is a class in :mod:`.plain`, :mod:`.stale`, :mod:`.experts`, :mod:`.distillation` or
:mod:`.preferences`, made of the groups of keys in :mod:`.keys`; an objective of a user's own is :class:`.own.OwnObjective`. The config
holds an instance under ``learner.objective``, and an objective of the learner
(:mod:`tandem.learner.objectives`) gets it as its settings. ``docs/objectives.md`` is made from them.
Nothing here imports torch or pydantic.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from ..errors import ConfigError
from ..import_path import is_import_path
from . import distillation, experts, plain, preferences, stale
from .keys import WITHOUT_GROUP, ObjectiveConfig
from .own import OwnObjective

__all__ = [
    "DEFAULT",
    "FAMILIES",
    "KEYS",
    "OBJECTIVES",
    "WITHOUT_GROUP",
    "ObjectiveConfig",
    "OwnObjective",
    "check_name",
    "kind_of",
    "reads",
    "renamed",
    "sets",
]

FAMILIES: Mapping[str, tuple[type[ObjectiveConfig], ...]] = MappingProxyType(
    {
        "Policy gradients on own tokens": plain.KINDS,
        "For stale samples": stale.KINDS,
        "With expert traces": experts.KINDS,
        "From a teacher": distillation.KINDS,
        "Preferences": preferences.KINDS,
    }
)
"""Headings of the page, with the objectives under each."""


def _default(kind: type[ObjectiveConfig], key: str) -> Any:
    found = next(one for one in fields(kind) if one.name == key)
    return found.default if found.default_factory is MISSING else found.default_factory()


OBJECTIVES: Mapping[str, type[ObjectiveConfig]] = MappingProxyType(
    {str(_default(kind, "name")): kind for kinds in FAMILIES.values() for kind in kinds}
)
"""Built-in values of ``learner.objective.name``."""
DEFAULT = "grpo"
"""The name that is used if a config gives none."""


def kind_of(name: str) -> type[ObjectiveConfig]:
    """The class for a name; a name that isn't built in is an objective of the user's own."""
    return OBJECTIVES.get(name, OwnObjective)


def reads(kind: type[ObjectiveConfig]) -> tuple[str, ...]:
    """Keys of an objective, apart from its name."""
    return tuple(one.name for one in fields(kind) if one.name != "name")


def sets(kind: type[ObjectiveConfig]) -> dict[str, Any]:
    """Keys for which an objective has a default of its own, with that default.

    >>> sets(OBJECTIVES["rloo"])
    {'advantage': 'leave_one_out'}
    """

    def times(key: str) -> int:
        return sum(key in inspect.get_annotations(one) for one in kind.__mro__)

    return {key: _default(kind, key) for key in reads(kind) if times(key) > 1}


KEYS: frozenset[str] = frozenset(
    key for kind in (*OBJECTIVES.values(), OwnObjective) for key in reads(kind)
)
"""Every key that at least one objective reads."""


def check_name(name: str) -> None:
    """Raises ``ConfigError`` for a name that is neither built in nor an import path."""
    if name in OBJECTIVES or is_import_path(name):
        return
    near = difflib.get_close_matches(name, OBJECTIVES, n=1, cutoff=0.5)
    raise ConfigError(
        f"learner.objective.name={name!r} isn't an objective{f' (did you mean {near[0]}?)' if near else ''}"
        f": choose one of {', '.join(OBJECTIVES)}, or name your own as package.module:function"
    )


def renamed(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section ``learner.objective`` under another name, without the keys that the new name sets itself.

    >>> renamed({"name": "luffy", "advantage": "group_mean", "dual_clip": 2.0}, "reinforce_pp")
    {'name': 'reinforce_pp', 'dual_clip': 2.0}
    """
    if name == section.get("name", DEFAULT):
        return {**section, "name": name}
    return {k: v for k, v in section.items() if k not in sets(kind_of(name))} | {"name": name}
