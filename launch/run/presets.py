"""Presets: named YAML files in ``configs/``, or a user's own, which may inherit from one another.

Beside the sections of the config a preset's file may hold:

- ``base``: the name or path of a preset that it inherits from; sections are merged key by key,
  lists are replaced;
- ``about``: one line for ``tandem presets``;
- ``untested``: true where nobody has run it yet.
"""

from __future__ import annotations

import sys
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
    """Also names the run's folder: ``runs/<name>``."""
    path: Path
    about: str
    """One line for ``tandem presets``."""
    untested: bool
    """Nobody has run it yet."""
    tree: Mapping[str, Any]
    """Sections of the config."""

    def resolve(self, overrides: Sequence[str], *, before: Sequence[str] = ()) -> Config:
        """Returns the validated config, with ``run.dir`` filled in.

        Args:
            overrides: settings of the form ``a.b=c``.
            before: overrides of the run's earlier starts, which ``overrides`` go over. They count as the
                preset's own: keys that the run's objective and engine don't read are left out.

        Raises:
            ConfigError: an unknown key, a wrong type, or values that don't go together.
        """
        from ...common.config import build, with_overrides

        try:
            config = build(with_overrides(self.tree, before), overrides)
        except ConfigError as error:
            if not overrides and not before:
                raise ConfigError(f"{self.path}: {error}") from None
            raise
        if config.run.dir is None:
            run = config.run.model_copy(update={"dir": f"runs/{self.name}"})
            config = config.model_copy(update={"run": run})
        return config

    def tell_unread(self, overrides: Sequence[str]) -> None:
        """Lists on standard error the preset's keys that the config's objective and engine don't read."""
        from ...common.config import unread_keys

        if unread := unread_keys(self.tree, overrides):
            print(
                f"tandem: left out of preset {self.name}, since the run's objective and engine read no "
                f"such key: {', '.join(unread)}",
                file=sys.stderr,
            )


def names() -> list[str]:
    """Names of the presets that are shipped, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, *, beside: Path | None = None, seen: tuple[Path, ...] = ()) -> Preset:
    """Reads a preset by its name or by its file's path.

    Raises:
        ConfigError: there is no such preset, it isn't a YAML mapping, or it inherits from itself.
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
    """Puts a preset's tree over its base's, from which it takes what its objective and engine read."""
    from ...common.config import of_kinds

    return merged(of_kinds(below, merged(below, above)), above)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two trees: mappings key by key; anything else is replaced.

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
    """Splits ``[preset] [a.b=c …]`` into the preset's name and the overrides.

    Raises:
        ConfigError: more than one word isn't an override.
    """
    overrides = [word for word in words if "=" in word]
    rest = [word for word in words if "=" not in word]
    if len(rest) > 1:
        raise ConfigError(
            f"only one preset can be given, not {' and '.join(rest)}; "
            f"write settings as section.key=value"
        )
    return (rest[0] if rest else default), overrides
