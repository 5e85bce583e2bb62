"""Presets: named YAML files in ``configs/``, or a user's own, which may inherit from one another.

Beside the sections of the config a preset's file may hold:

- ``base``: the name or path of a preset that it inherits from, or a list of them, each laid over those
  before it; sections are merged key by key, lists are replaced;
- ``stages``: a list of runs that one command makes one after another (:mod:`..several.placing`), each with a
  ``name``, perhaps a ``base`` of its own, sections that go over the file's, and ``by_name``, a list of
  sections of which settings on the command line reach it only with its name in front;
- ``rounds``: how often the stages are gone through;
- ``about``: one line for ``tandem presets``;
- ``untested``: true where nobody has run it yet.

Wherever a preset is named, ``one+another`` means the second laid over the first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....common.errors import ConfigError
from ...wording import nearest

if TYPE_CHECKING:
    from ....common.config import Config

FOLDER = Path(__file__).parents[2] / "configs"
STAGE_NAME = re.compile("[a-z][a-z0-9-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of a preset's runs, before it is known which folders the runs before it have."""

    name: str
    below: Mapping[str, Any]
    """Sections that it inherits."""
    own: Mapping[str, Any]
    """Sections that go over them. A text in it may name another stage's folder, as ``{sft}/model``."""
    by_name: tuple[str, ...] = ()
    """Sections of which settings on the command line reach it only with its name in front."""


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
    stages: tuple[Stage, ...] = ()
    """Runs that are made one after another; none where the preset is a single run."""
    rounds: int = 1
    """How often the stages are gone through."""

    @property
    def is_shipped(self) -> bool:
        """Whether it is none of the user's own."""
        return self.path.parent == FOLDER

    def resolve(self, overrides: Sequence[str], *, before: Sequence[str] = ()) -> Config:
        """Returns the validated config, with ``run.dir`` filled in.

        Args:
            overrides: settings of the form ``a.b=c``.
            before: overrides of the run's earlier starts, which ``overrides`` go over. They count as the
                preset's own: keys that the run's objective and engine don't read are left out.

        Raises:
            ConfigError: an unknown key, a wrong type, or values that don't go together.
        """
        from ....common.config import build, with_overrides

        try:
            config = build(with_overrides(self.tree, before), overrides)
        except ConfigError as error:
            if self.stages:
                names = " and ".join(stage.name for stage in self.stages)
                raise ConfigError(
                    f"{self.path} has stages ({names}) and isn't a single run: name a preset that is ({error})"
                ) from None
            if not overrides and not before:
                raise ConfigError(f"{self.path}: {error}") from None
            raise
        if config.run.dir is None:
            run = config.run.model_copy(update={"dir": f"runs/{self.name}"})
            config = config.model_copy(update={"run": run})
        return config

    def tell_unread(self, overrides: Sequence[str]) -> None:
        """Lists on standard error the preset's keys that its objective, optimizer and engine don't read, and settings
        that another one switches off."""
        from ....common.config import switched_off_keys, unread_keys

        if unread := unread_keys(self.tree, overrides):
            print(
                f"tandem: left out of preset {self.name}, since the run's objective, optimizer and "
                f"engine read no such key: {', '.join(unread)}",
                file=sys.stderr,
            )
        if idle := switched_off_keys(self.tree, overrides):
            print(
                f"tandem: nothing reads these settings, since others switch them off: {', '.join(idle)}",
                file=sys.stderr,
            )


def names() -> list[str]:
    """Names of the presets that are shipped, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, *, beside: Path | None = None, seen: tuple[Path, ...] = ()) -> Preset:
    """Reads a preset by its name or by its file's path, or several that are joined by ``+``.

    Raises:
        ConfigError: there is no such preset, it isn't a YAML mapping, or it inherits from itself.
    """
    from ....common.config import read_yaml

    joined = name.split("+")
    if len(joined) > 1 and not ((beside or Path()) / name).expanduser().exists():
        place = Path() if is_own(name) else FOLDER
        # No file has this path: it tells one run's presets from another's.
        return replace(_laid(joined, beside, seen), path=place.absolute() / name)
    if _is_path(name):
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
    stages, rounds = tree.pop("stages", None), tree.pop("rounds", None)
    below = _laid(tree.pop("base", None) or [], path.parent, (*seen, path))
    if stages is None:
        made = tuple(replace(stage, below=over(stage.below, tree)) for stage in below.stages)
    else:
        made = _stages(stages, path, seen, below.tree, tree)
    rounds = below.rounds if rounds is None else rounds
    if type(rounds) is not int or rounds < 1 or (rounds > 1 and not made):
        raise ConfigError(f"{path}: rounds={rounds!r} should be a number from 1, beside stages")
    return Preset(
        name=path.stem,
        path=path,
        about=about,
        untested=untested,
        tree=over(below.tree, tree),
        stages=made,
        rounds=rounds,
    )


def _stages(
    given: Any, path: Path, seen: tuple[Path, ...], below: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[Stage, ...]:
    """The stages that a preset's file lists.

    Args:
        given: the file's content.
        path: the file.
        seen: files that inherit from it.
        below: the sections that the file inherits.
        own: its own sections, which all stages share.
    """
    from ....common.config import Config

    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise ConfigError(f"{path}: stages should be a list of mappings, each with a name")
    made: list[Stage] = []
    for one in map(dict, given):
        name, base = one.pop("name", None), one.pop("base", None)
        by_name = one.pop("by_name", [])
        if not isinstance(name, str) or not STAGE_NAME.fullmatch(name):
            raise ConfigError(
                f"{path}: a stage's name is {name!r}: it should be of a-z, 0-9 and -, as in sft"
            )
        if name in Config.model_fields or name in ("run", "round"):
            raise ConfigError(f"{path}: a stage can't be named {name}, which means something else")
        if any(stage.name == name for stage in made):
            raise ConfigError(f"{path}: two stages are named {name}: give each its own name")
        under = below
        if base is not None:
            inherited = _laid(base, path.parent, (*seen, path))
            if inherited.stages:
                raise ConfigError(
                    f"{path}: stage {name} can't inherit from {base}, which has stages"
                )
            under = over(below, inherited.tree)
        if not isinstance(by_name, list) or not set(map(str, by_name)) <= set(Config.model_fields):
            raise ConfigError(
                f"{path}: stage {name}: by_name={by_name!r} should be a list of sections, as in [learner]"
            )
        below_it = over(under, own)
        made.append(Stage(name=name, below=below_it, own=one, by_name=tuple(by_name)))
    return tuple(made)


def is_own(name: str) -> bool:
    """Whether a preset, or one of those that are joined by ``+``, is a file of the user's own."""
    return any(_is_path(one) for one in name.split("+"))


def _is_path(name: str) -> bool:
    """Whether a preset is named by its file's path."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def _laid(given: Any, beside: Path | None, seen: tuple[Path, ...]) -> Preset:
    """Presets laid over one another, the first one lowest; an empty one if there are none.

    Stages are those of the last that has any; what is laid over them is below their own sections.
    """
    names = given if isinstance(given, list) else [given]
    laid = Preset(name="", path=Path(), about="", untested=False, tree={})
    for one in (load(str(name), beside=beside, seen=seen) for name in names):
        stages = tuple(replace(stage, below=over(laid.tree, stage.below)) for stage in one.stages)
        if not stages:
            stages = tuple(
                replace(stage, below=over(stage.below, one.tree)) for stage in laid.stages
            )
        laid = Preset(
            name=f"{laid.name}+{one.name}".lstrip("+"),
            path=one.path,
            about=laid.about or one.about,
            untested=laid.untested or one.untested,
            tree=over(laid.tree, one.tree),
            stages=stages,
            rounds=one.rounds if one.stages else laid.rounds,
        )
    return laid


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Puts a preset's tree over its base's, from which it takes what its objective and engine read."""
    from ....common.config import of_kinds

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
            f"only one preset can be given, not {' and '.join(rest)}: write settings as section.key=value, "
            f"or lay one preset over another with {'+'.join(rest)}"
        )
    return (rest[0] if rest else default), overrides


def from_kept(word: str) -> str:
    """A kept override as it is read today: 0.2.0 took a bare ``None`` for that text."""
    key, _, value = word.partition("=")
    return f"{key}='None'" if value.strip() == "None" else word
