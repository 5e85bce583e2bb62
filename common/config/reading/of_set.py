"""The config with which one held-out set is read, sampled and graded."""

from __future__ import annotations

from typing import Any

from ..data import EvalSetConfig
from ..reward import ComponentConfig
from ..tree import Config

OWN = {
    "data": ("template", "stop"),
    "evaluate": ("samples", "temperature", "top_p"),
    "rollout": ("max_new_tokens",),
    "reward": ("mode",),
}
"""Settings that a set may have of its own, by their section."""


def of_set(config: Config, held_out: EvalSetConfig) -> Config:
    """The run's config with the set's own settings in it.

    A template of its own brings its own stop strings, unless the set names others. A set that isn't graded
    has no component that needs a gold answer.
    """
    changed: dict[str, Any] = {}
    for section, keys in OWN.items():
        given = {key: getattr(held_out, key) for key in keys}
        own = {key: value for key, value in given.items() if value is not None}
        if "template" in own:
            own.setdefault("stop", None)
        if own:
            changed[section] = getattr(config, section).model_copy(update=own)
    if not held_out.graded:
        form = ComponentConfig(name="format", weight=0.0)
        reward = changed.get("reward", config.reward)
        changed["reward"] = reward.model_copy(update={"components": (form,)})
    return config.model_copy(update=changed) if changed else config
