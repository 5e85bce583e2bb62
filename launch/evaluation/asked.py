"""What an evaluation is asked for: models, sets, and every combination of the values that are given for a set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...common import evaluation_sets, hub
from ...common.config import Config, EvalSetConfig
from ...common.errors import ConfigError

KEYS = ("models", "benchmarks", "temperatures", "top_p", "templates")
"""Keys of a plan's YAML that are lists."""
SEVERAL = {"template": "templates", "temperature": "temperatures", "top_p": "top_p"}
"""Settings of a set of which each value makes a cell, and their keys in a plan's YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line or the YAML asks for."""

    models: tuple[str, ...]
    benchmarks: tuple[EvalSetConfig, ...]
    """One for each way in which a benchmark is asked."""
    second_mode: str | None = None
    token_ids: bool = False
    endpoint: str | None = None
    """Address of a server that has the models."""


def benchmark(given: Any, *, form: str | None = None) -> list[EvalSetConfig]:
    """The sets that a name, a path or an entry stands for.

    Args:
        given: a known name, a path here or on the hub, or an entry of ``data.evaluate``.
        form: form of its rows, if it isn't to be found out.

    Raises:
        ConfigError: it is nothing of this.
    """
    try:
        if not isinstance(given, str):
            entries = evaluation_sets.entries([given])
        elif given in evaluation_sets.names():
            entries = evaluation_sets.named(given)
        else:
            place = Path(given).expanduser()
            if not place.exists() and hub.HubData.parse(given) is None:
                # It names the nearest.
                evaluation_sets.named(given)
            return [of_path(given, form)]
        given_here = {} if form is None else {"form": form}
        return [EvalSetConfig(**{**entry, **given_here}) for entry in entries]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"benchmark {given}: {error}") from None


def of_path(path: str, form: str | None) -> EvalSetConfig:
    """The set that a path here or on the hub is."""
    return EvalSetConfig(path=path, name=_stem(path), form=form)


def sets_of(config: Config, names: Sequence[str] | None) -> list[EvalSetConfig]:
    """The run's held-out sets that are named, in this order; all of them where none is.

    Raises:
        ConfigError: the run has no such set, or none at all.
    """
    sets = {one.name: one for one in config.data.evaluate}
    if not sets:
        raise ConfigError("the run has no held-out set: name problems with --data FILE")
    for name in names or ():
        if name not in sets:
            raise ConfigError(f"--set {name}: the run has {', '.join(sets)}")
    return [sets[name] for name in dict.fromkeys(names or sets)]


Values = Mapping[str, Sequence[Any]]
"""Of settings of a set, by their names."""


def ways(held_out: EvalSetConfig, given: Values, otherwise: Values) -> list[EvalSetConfig]:
    """The set with every combination of the values that are asked for.

    Args:
        held_out: a set, whose own value counts where none is given.
        given: what the command line says.
        otherwise: what a plan says for sets that say nothing themselves.

    Raises:
        ConfigError: a value can't be.
    """
    own = held_out.model_dump()
    names = (*SEVERAL, "samples", "limit")
    lists = []
    for name in names:
        values = [*given.get(name, ()), *(otherwise.get(name, ()) if own[name] is None else ())]
        every = list(dict.fromkeys(values)) or [own[name]]
        lists.append(every if name in SEVERAL else every[:1])
    try:
        return [
            EvalSetConfig(**{**own, **dict(zip(names, values, strict=True))})
            for values in product(*lists)
        ]
    except ValidationError as error:
        wrong = error.errors()[0]
        what = f"{wrong['loc'][0]} {wrong['input']!r}"
        raise ConfigError(f"{held_out.name}: {what}: {wrong['msg']}") from None


def _stem(path: str) -> str:
    parsed = None if Path(path).expanduser().exists() else hub.HubData.parse(path)
    return Path(path).stem if parsed is None else parsed.repo.rpartition("/")[2]


def distinct(sets: Sequence[EvalSetConfig]) -> list[EvalSetConfig]:
    """The sets, those with the same name named by their folders too."""
    names = [one.name for one in sets]
    return [
        one.model_copy(update={"name": slug(str(Path(one.path).with_suffix("")))})
        if names.count(one.name) > 1
        else one
        for one in sets
    ]


def from_yaml(content: Mapping[str, Any], name: str) -> dict[str, list[Any]]:
    """The lists of a plan's YAML; a single value stands for a list of one, and nothing for an empty one.

    Raises:
        ConfigError: it has another key, or a value of the wrong type.
    """
    unknown = sorted(content.keys() - {*KEYS, "samples", "limit", "settings"})
    if unknown:
        raise ConfigError(
            f"{name}: unknown key {unknown[0]!r}: it may have {', '.join(KEYS)}, samples, limit and settings"
        )
    found = {}
    for key in (*KEYS, "settings", "samples", "limit"):
        value = content.get(key)
        found[key] = value if isinstance(value, list) else [] if value is None else [value]
        if None in found[key]:
            raise ConfigError(f"{name}: {key} has an empty entry: leave it out")
    for key in ("temperatures", "top_p"):
        for value in found[key]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name}: {key} has {value!r}, which isn't a number")
    for value in found["templates"]:
        if not isinstance(value, str):
            raise ConfigError(f"{name}: templates has {value!r}, which isn't a name or a path")
    for value in found["settings"]:
        if not isinstance(value, str) or "=" not in value:
            raise ConfigError(f"{name}: settings has {value!r}: write each as section.key=value")
    for key in ("samples", "limit"):
        value = content.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}: {key} is {value!r}, and should be a whole number from 1")
    return found


def slug(text: str) -> str:
    """A text as a part of a file's name: its last two folders' names, with hyphens for what can't be in one.

    >>> slug("runs/miniature@50"), slug("Qwen/Qwen2.5-Math-1.5B"), slug("/a/b/c/model/")
    ('runs-miniature@50', 'Qwen-Qwen2.5-Math-1.5B', 'c-model')
    """
    short = "/".join(text.rstrip("/").split("/")[-2:])
    return re.sub(r"[^\w@+.-]+", "-", short).strip("-.") or "-"
