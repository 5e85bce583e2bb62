"""Presets: named YAML files in ``configs/``, or a user's own, which may inherit from one another.

Beside the sections of the config a preset's file may hold:

- ``base``: the name or path of a preset that it inherits from; sections are merged key by key,
  lists are replaced;
- ``about``: one line for ``tandem presets``;
- ``untested``: true where nobody has run it yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError
from ..wording import nearest

if TYPE_CHECKING:
    from ...common.config import Config

FOLDER = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One preset, its inheritance resolved."""

    name: str
    """Names the run's folder: ``runs/<name>``."""
    path: Path
    """The preset's file."""
    about: str
    """One line."""
    untested: bool
    """Nobody has run it yet."""
    tree: Mapping[str, Any]
    """Sections of the config."""

    def resolve(self, overrides: Sequence[str]) -> Config:
        """The validated config, ``run.dir`` filled in.

        Raises:
            ConfigError: an unknown key, a wrong type, or values that don't go together.
        """
        from ...common.config import build
        from ...common.objectives import check_name

        try:
            config = build(self.tree, overrides)
            check_name(config.learner.objective.name)
        except ConfigError as error:
            if not overrides:
                raise ConfigError(f"{self.path}: {error}") from None
            raise
        if config.run.dir is None:
            run = config.run.model_copy(update={"dir": f"runs/{self.name}"})
            config = config.model_copy(update={"run": run})
        return config


def names() -> list[str]:
    """Presets that are shipped, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, *, beside: Path | None = None, seen: tuple[Path, ...] = ()) -> Preset:
    """Reads a preset by its name or its file's path.

    Raises:
        ConfigError: there is none; it isn't a YAML mapping; it inherits from itself.
    """
    from ...common.config import read_yaml

    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if beside is not None:
            path = beside / path
    else:
        path = FOLDER / f"{name}.yaml"
        if not path.exists():
            raise ConfigError(
                f"there is no preset {name!r}{nearest(name, names())}; "
                f"for a file of your own give its path, ending in .yaml"
            )
    path = path.absolute()
    if path in seen:
        raise ConfigError(f"{path} inherits from itself: {' -> '.join(p.name for p in seen)}")
    tree = read_yaml(path)
    about = str(tree.pop("about", ""))
    untested = bool(tree.pop("untested", False))
    base = tree.pop("base", None)
    if base is not None:
        below = load(str(base), beside=path.parent, seen=(*seen, path))
        tree = _over(below.tree, tree)
    return Preset(name=path.stem, path=path, about=about, untested=untested, tree=tree)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's tree over that of its base, whose objective may have another name."""
    from ...common.objectives import renamed

    tree = merged(below, above)
    names = [_objective(of).get("name") for of in (below, above)]
    if names[1] is not None and names[1] != (names[0] or "grpo"):
        section = {**renamed(_objective(below), str(names[1])), **_objective(above)}
        tree["learner"] = {**tree["learner"], "objective": section}
    return tree


def _objective(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    learner = tree.get("learner")
    section = learner.get("objective") if isinstance(learner, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees as one: mappings are merged key by key, everything else is replaced.

    >>> merged({"run": {"seed": 0, "steps": 2}}, {"run": {"steps": 9}})
    {'run': {'seed': 0, 'steps': 9}}
    """
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


def split(words: Sequence[str], default: str) -> tuple[str, list[str]]:
    """``[preset] [a.b=c …]`` as the preset's name and the overrides.

    Raises:
        ConfigError: more than one word that isn't an override.
    """
    overrides = [word for word in words if "=" in word]
    rest = [word for word in words if "=" not in word]
    if len(rest) > 1:
        raise ConfigError(
            f"only one preset can be given, not {' and '.join(rest)}; "
            f"write settings as section.key=value"
        )
    return (rest[0] if rest else default), overrides
