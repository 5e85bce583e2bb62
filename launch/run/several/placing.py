"""Which runs a preset with stages is: for every stage of every round its folder, its preset and its overrides.

A later stage names what an earlier one has made, as in ``model: {path: "{sft}/model"}``. ``stages.json`` in the
common folder says how they were asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....common.errors import ConfigError, DataError
from ....common.run_folder import RunFolder, read_stages
from ...wording import shown
from ..opened.presets import Preset, from_kept, over

_NAMED = re.compile(r"\{([a-z][a-z0-9-]*)\}")
ROUND = "{round}"
"""A setting that is the number of the round."""
ROUNDS_APART = 1000
"""Between the numbers that stand for the rounds of one ``run.seed`` and of the next."""
_FOLDER = re.compile(r"\{([\w-]+)\}/")
"""How a setting begins that is a path in a named folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One stage with the folder that it gets, ready to be opened."""

    label: str
    """Name of the stage, with the number of the round if there are several, here or in the preset."""
    name: str
    folder: Path
    preset: Preset
    """The run alone."""
    by_name: tuple[str, ...]
    """See :class:`..opened.presets.Stage`."""
    round: int
    by_round: frozenset[str]
    """Settings that are the number of the round."""


def folder_of(preset: Preset, overrides: Sequence[str]) -> Path:
    """The folder of a preset's run, or the one that holds those of its stages.

    Raises:
        ConfigError: ``run.dir`` isn't a text, or a single run's settings are refused.
    """
    from ....common.config import parse_override

    if not preset.stages:
        return Path(str(preset.resolve(overrides).run.dir))
    given = [parse_override(word) for word in overrides if setting_of(word) == "run.dir"]
    folder = given[-1][1] if given else None
    if not isinstance(folder, str | None):
        raise ConfigError(f"run.dir={folder!r} should be a folder's path: a text in YAML")
    return Path(folder or f"runs/{preset.name}").expanduser()


def setting_of(word: str) -> str:
    """The setting that an override names."""
    return word.partition("=")[0].strip()


def placed(preset: Preset, overrides: Sequence[str]) -> list[Placed]:
    """The stages of a preset in their order, one round after the other.

    Raises:
        ConfigError: a stage names a folder that no stage before it makes, or no stage at all.
    """
    rounds = _rounds(preset, overrides)
    # One round of several is the beginning of more.
    numbered = max(rounds, preset.rounds) > 1
    top = folder_of(preset, overrides)
    names = [stage.name for stage in preset.stages]
    for stage in preset.stages:
        for word in _folders(stage.own):
            if word not in (*names, "run", "round"):
                raise ConfigError(
                    f"{preset.path}: stage {stage.name} names {{{word}}}: the stages are {', '.join(names)}"
                )
    made: list[Placed] = []
    for number in range(1, rounds + 1):
        for stage in preset.stages:
            label = f"{stage.name}-{number}" if numbered else stage.name
            places = {one.name: str(one.folder) for one in made}
            own = _filled(stage.own, names, places, number)
            if not numbered and own != _filled(stage.own, [], places, number):
                lacking = next(n for n in _NAMED.findall(str(stage.own)) if n not in places)
                raise ConfigError(
                    f"{preset.path}: stage {stage.name} names the folder of stage {lacking}, which "
                    f"isn't before it"
                )
            tree = over(over(stage.below, own), {"run": {"dir": str(top / label)}})
            run = replace(preset, name=f"{preset.name}-{label}", tree=tree, stages=(), rounds=1)
            made.append(
                Placed(
                    label=label,
                    name=stage.name,
                    folder=top / label,
                    preset=run,
                    by_name=stage.by_name,
                    round=number,
                    by_round=frozenset(_by_round(stage.own)),
                )
            )
    return made


def _rounds(preset: Preset, overrides: Sequence[str]) -> int:
    given = [word.partition("=")[2].strip() for word in overrides if setting_of(word) == "rounds"]
    if not given:
        return preset.rounds
    if not given[-1].isdecimal() or int(given[-1]) < 1:
        raise ConfigError(f"rounds={given[-1]} should be a number from 1")
    return int(given[-1])


def _folders(tree: Any) -> Iterator[str]:
    """Names with which settings begin that are paths in a named folder."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _folders(value)
    elif isinstance(tree, str) and (found := _FOLDER.match(tree)):
        yield found[1]


def _filled(tree: Any, names: Sequence[str], places: Mapping[str, str], number: int) -> Any:
    """A stage's sections with the folders in place of the stages' names.

    A setting that names a stage of which there is no run yet is left out, and so is an item of a list: in the first
    round the model is the one that the preset inherits.
    """
    if isinstance(tree, Mapping):
        filled = {key: _filled(value, names, places, number) for key, value in tree.items()}
        return {key: value for key, value in filled.items() if value is not _NOT_YET}
    if isinstance(tree, list):
        items = [
            _filled(value, names, places, number)
            for value in tree
            if not _names_none(value, names, places)
        ]
        return _NOT_YET if tree and not items else items
    if not isinstance(tree, str):
        return tree
    if tree == ROUND:
        return number
    if _names_none(tree, names, places):
        return _NOT_YET
    known = {**places, "round": str(number)}
    return _NAMED.sub(lambda found: known.get(found[1], found[0]), tree)


_NOT_YET = object()


def _names_none(tree: Any, names: Sequence[str], places: Mapping[str, str]) -> bool:
    """Whether something in it names a stage of which there is no run yet."""
    return any(name in names and name not in places for name in _NAMED.findall(str(tree)))


def _by_round(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Settings that are the number of the round, each with its section."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _by_round(value, f"{prefix}{key}.")
        elif value == ROUND:
            yield prefix + key


def _in_round(word: str, stage: Placed) -> str:
    """An override as a round gets it: a seed for all rounds gives each of them one of its own."""
    key, _, value = word.partition("=")
    if key not in stage.by_round or not re.fullmatch(r"-?\d+", value):
        return word
    return f"{key}={int(value) * ROUNDS_APART + stage.round}"


def words_of(stage: Placed, overrides: Sequence[str], stages: Sequence[Placed]) -> list[str]:
    """The overrides that a stage gets: ``sft.run.steps=5`` is for the stage ``sft`` alone, in all rounds, and
    ``sft-2.run.steps=5`` for its second one.

    Raises:
        ConfigError: an override names the folder of a stage.
    """
    others = {one.name for one in stages} | {one.label for one in stages}
    kept = []
    for word in overrides:
        first, dot, rest = word.partition(".")
        if setting_of(word) in ("run.dir", "rounds"):
            continue
        _refuse_folder(word, rest if first in others else word)
        if not dot or first not in others:
            if first.partition("=")[0] not in stage.by_name:
                kept.append(_in_round(word, stage))
        elif first == stage.label:
            kept.append(rest)
        elif first == stage.name:
            kept.append(_in_round(rest, stage))
    return kept


def still_named(known: Sequence[str], stages: Sequence[Placed]) -> list[str]:
    """The overrides of earlier starts without those for stages that there are no longer, as with fewer rounds."""
    from ....common.config import Config

    names = {one.name for one in stages} | {one.label for one in stages} | set(Config.model_fields)
    return [
        word for word in known if "." not in setting_of(word) or word.partition(".")[0] in names
    ]


def _refuse_folder(word: str, setting: str) -> None:
    """Refuses an override that would put a stage where the stages after it don't look.

    Args:
        word: as it was given.
        setting: without the name of a stage.
    """
    from ....common.config import parse_override

    key, value = parse_override(setting)
    if key == "run.dir" or (key == "run" and isinstance(value, Mapping) and "dir" in value):
        raise ConfigError(
            f"{word}: the folders of the stages lie below run.dir: give run.dir=… by itself, without a stage's name, "
            f"for the folder that holds them all"
        )


def of_preset(preset: Preset, overrides: Sequence[str]) -> Iterator[tuple[str, Preset, list[str]]]:
    """Every run of a preset: its label (empty for a single run), its own preset and its overrides."""
    if not preset.stages:
        yield "", preset, list(overrides)
        return
    stages = placed(preset, overrides)
    for stage in stages:
        yield stage.label, stage.preset, words_of(stage, overrides, stages)


def of_plan(preset: Preset, overrides: Sequence[str]) -> Iterator[tuple[str, Preset, list[str]]]:
    """As :func:`of_preset`, but a stage whose model or teacher an earlier stage has yet to make gets the model that the
    earlier stage begins from, which has the same sizes."""
    begun_from: dict[Path, str] = {}
    for label, run, words in of_preset(preset, overrides):
        config = run.resolve(words)
        model = _begun_from(config.model.path, begun_from)
        tree: dict[str, Any] = {"model": {"path": model}}
        if config.learner.teacher is not None:
            tree["learner"] = {"teacher": _begun_from(config.learner.teacher, begun_from)}
        if label:
            begun_from[folder_of(preset, overrides) / label] = model
            run = replace(run, tree=over(run.tree, tree))
        yield label, run, words


def _begun_from(model: str, stages: Mapping[Path, str]) -> str:
    """A model, or in place of one that a stage has yet to make the one that this stage begins from."""
    maker = next((folder for folder in Path(model).parents if folder in stages), None)
    return model if maker is None or Path(model).exists() else stages[maker]


def begun_with(preset: Preset, overrides: Sequence[str]) -> list[str] | None:
    """The overrides of earlier starts that still count; None where no stage of the preset was started.

    Raises:
        DataError: the folder holds something else.
    """
    before = (
        begun_before(RunFolder(folder_of(preset, overrides)), preset) if preset.stages else None
    )
    if before is None:
        return None
    known = before["overrides"]
    return still_named(known, placed(preset, [*known, *overrides]))


def begun_before(top: RunFolder, preset: Preset) -> dict[str, Any] | None:
    """What ``stages.json`` says; None where nothing was started."""
    record = read_stages(top.path)
    if record is None and not _others(top):
        return None
    if record is None or record.get("preset") != preset.name:
        raise DataError(
            f"{shown(top.path)} holds something other than the stages of {preset.name}: name another "
            f"folder with run.dir=…"
        )
    return {**record, "overrides": [from_kept(word) for word in record.get("overrides", [])]}


def _others(top: RunFolder) -> bool:
    """Whether a folder holds more than what a command leaves that is killed before it writes ``stages.json``."""
    if not top.path.exists():
        return False
    names = [entry.name for entry in top.path.iterdir()]
    return any(name not in ("lock", "head") and not name.startswith(".") for name in names)
