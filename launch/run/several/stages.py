"""Runs that one command makes one after another: SFT and then RL, or the rounds of expert iteration.

Each stage is an ordinary run in a folder of its own below the preset's. A later stage names what an
earlier one has made, as in ``model: {path: "{sft}/model"}``. ``stages.json`` in the common folder says
which runs belong together and how they were asked for; everything else is in the runs themselves, so
that a command that is given again goes on wherever the last one ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....common import disk
from ....common.errors import ConfigError, DataError, TandemError
from ....common.plain import read_object
from ....common.run_folder import RunFolder, read_stages, write_atomic
from ...board.lines import await_reader
from ...board.terminal import Terminal
from ...host.folder_lock import FolderLock
from ...host.preflight import check_critic, check_model, check_teacher
from ...wording import shown
from .. import summary
from ..ending import was_stopped
from ..job import command_again, run_job
from ..opened.opening import Kind, Opening, free_name, open_folder, open_preset, open_run
from ..opened.presets import Preset, over
from ..opened.record import as_kept

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
    given = [parse_override(word) for word in overrides if _key(word) == "run.dir"]
    folder = given[-1][1] if given else None
    if not isinstance(folder, str | None):
        raise ConfigError(f"run.dir={folder!r} should be a folder's path: a text in YAML")
    return Path(folder or f"runs/{preset.name}").expanduser()


def _key(word: str) -> str:
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
    given = [word.partition("=")[2].strip() for word in overrides if _key(word) == "rounds"]
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
        if _key(word) in ("run.dir", "rounds"):
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


def _still_named(known: Sequence[str], stages: Sequence[Placed]) -> list[str]:
    """The overrides of earlier starts without those for stages that there are no longer, as with fewer rounds."""
    from ....common.config import Config

    names = {one.name for one in stages} | {one.label for one in stages} | set(Config.model_fields)
    return [word for word in known if "." not in _key(word) or word.partition(".")[0] in names]


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
    before = _read(RunFolder(folder_of(preset, overrides)), preset) if preset.stages else None
    if before is None:
        return None
    known = before["overrides"]
    return _still_named(known, placed(preset, [*known, *overrides]))


def run_words(words: Sequence[str], *, fresh: bool, offline: bool, plain: bool = False) -> int:
    """Runs ``tandem start`` (or ``offline``) and returns the exit code.

    Args:
        words: preset and settings.
        fresh: move an old folder aside.
        offline: train on what is stored.
        plain: print lines, even where a live view could be drawn.

    Raises:
        TandemError: the message is for the user; the same command goes on.
    """
    disk.keep_streams()
    preset, overrides = open_preset(words, offline=offline)
    try:
        if preset.stages:
            command = "offline" if offline else "start"
            code = _run_stages(preset, overrides, command=command, fresh=fresh, plain=plain)
        else:
            opening = open_run(preset, overrides, fresh=fresh, offline=offline)
            code = run_job(preset, opening, Terminal(plain=plain))
    except TandemError:
        await_reader()
        raise
    if not was_stopped(code):
        # Whoever stops a run by a signal, as a scheduler does, waits for its end.
        await_reader()
    return code


def _run_stages(
    preset: Preset, overrides: Sequence[str], *, command: str, fresh: bool, plain: bool
) -> int:
    """Runs the stages that aren't finished, one after another, and sums them up; returns the exit code.

    Args:
        preset: has stages.
        overrides: settings for all stages, or (``sft.run.steps=5``) for one.
        command: ``start`` or ``offline``, to be shown to the user.
        fresh: move the common folder aside.
        plain: print lines, even where a live view could be drawn.

    Raises:
        TandemError: the message is for the user; the same command goes on.
    """
    terminal = Terminal(plain=plain)
    top = RunFolder(folder_of(preset, overrides))
    before = _read(top, preset)
    if before is not None and fresh:
        _open(placed(preset, overrides), overrides, [], fresh=True)
        _move_aside(top, before["stages"], terminal)
        before = None
    known = before["overrides"] if before is not None else []
    words = [*known, *overrides]
    stages = placed(preset, words)
    known = _still_named(known, stages)
    if before is not None:
        _refuse_renaming(top, before["stages"], stages)
    openings = _open(stages, overrides, known)
    # A command that ended after the last stage hasn't summed them up.
    if top.summary.exists() and all(opening.kind is Kind.FINISHED for opening in openings):
        terminal.say(
            f"{shown(top.path)} is finished. Start over with --fresh (the folder is moved aside)"
        )
        return 0
    top.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FolderLock(top)
    lock.take()
    try:
        kept = [as_kept(word) for word in words]
        record = {
            "preset": preset.name,
            "preset_path": str(preset.path),
            "overrides": [word for word in kept if _key(word) != "run.dir"],
            "stages": [stage.label for stage in stages],
        }
        content = json.dumps(record, indent=1) + "\n"
        disk.persist(top.stages, lambda: write_atomic(top.stages, content))
        if any(opening.kind is not Kind.FINISHED for opening in openings):
            # If this command is killed before it sums them up, the next one must see that it has to.
            top.summary.unlink(missing_ok=True)
        again = command_again(preset, command, top.path)
        for place, stage in enumerate(stages):
            if openings[place].kind is Kind.FINISHED:
                continue
            terminal.say(f"stage {place + 1} of {len(stages)}: {stage.label}")
            code = _run(stage, stages, overrides, known, again, plain)
            if code:
                return code
        return _sum_up(preset, kept, stages, top, terminal)
    finally:
        lock.release()


def _read(top: RunFolder, preset: Preset) -> dict[str, Any] | None:
    """What ``stages.json`` says; None where nothing was started."""
    record = read_stages(top.path)
    if record is None and not _others(top):
        return None
    if record is None or record.get("preset") != preset.name:
        raise DataError(
            f"{shown(top.path)} holds something other than the stages of {preset.name}: name another "
            f"folder with run.dir=…"
        )
    return record


def _others(top: RunFolder) -> bool:
    """Whether a folder holds more than what a command leaves that is killed before it writes ``stages.json``."""
    if not top.path.exists():
        return False
    names = [entry.name for entry in top.path.iterdir()]
    return any(name not in ("lock", "head") and not name.startswith(".") for name in names)


def _refuse_renaming(top: RunFolder, before: Sequence[str], stages: Sequence[Placed]) -> None:
    """Refuses other names for stages of which the first has begun, since all of them would begin anew."""
    old, new = before[0] if before else "", stages[0].label
    if old and old != new and RunFolder(top.path / old).run_json.exists():
        raise ConfigError(
            f"{shown(top.path)} holds the stage {old}, which is {new} with this number of rounds, so that all stages "
            f"would begin anew: give rounds=… as it was, start over with --fresh (the folder is moved aside), or "
            f"name another with run.dir=…"
        )


def _open(
    stages: Sequence[Placed], overrides: Sequence[str], known: Sequence[str], fresh: bool = False
) -> list[Opening]:
    """Looks at every stage's folder, and for what it begins from, and refuses what can't work; writes nothing."""
    openings = [_opening(stage, stages, overrides, known, fresh) for stage in stages]
    kinds = [opening.kind for opening in openings]
    for place, stage in enumerate(stages):
        later = [s.label for s, kind in zip(stages, kinds, strict=True) if kind is not Kind.NEW]
        if kinds[place] is not Kind.FINISHED and any(
            kind is not Kind.NEW for kind in kinds[place + 1 :]
        ):
            raise ConfigError(
                f"stage {stage.label} can't go on, since stage {later[-1]} has begun from what it made: "
                f"start over with --fresh (the folder is moved aside), or name another with run.dir=…"
            )
    for place, (stage, opening) in enumerate(zip(stages, openings, strict=True)):
        if opening.kind is not Kind.FINISHED:
            made = [one.folder.absolute() for one in stages[: place + 1]]
            try:
                _look_for_inputs(opening, made)
            except (ConfigError, DataError) as error:
                raise type(error)(f"stage {stage.label}: {error}") from None
    return openings


def _look_for_inputs(opening: Opening, made: Sequence[Path]) -> None:
    """Refuses a stage of which a model or data set isn't there; looks for nothing that a stage is to make.

    Args:
        opening: a stage that is to begin or to go on.
        made: the folders of this stage and of those before it.

    Raises:
        ConfigError: a model doesn't fit the stage's other settings.
        DataError: something isn't there, or lacks something.
    """
    from ....common import hub
    from ....replay.forms import data_files

    config = opening.config

    def is_made(path: str) -> bool:
        place = Path(os.path.abspath(opening.folder.resolve(path)))
        return any(place.is_relative_to(folder) for folder in made)

    made_own = is_made(config.model.path)
    if not made_own:
        check_model(config)
    critic, teacher = config.learner.critic, config.learner.teacher
    if critic is not None and critic.model is not None and not is_made(critic.model):
        check_critic(config, alone=made_own)
    if teacher is not None and not is_made(teacher):
        check_teacher(config, alone=made_own)
    paths = [source.path for source in config.data.train]
    paths += [one.path for one in config.data.evaluate]
    if config.data.archive is not None:
        paths.append(config.data.archive)
    for path in paths:
        place = opening.folder.resolve(path)
        # What is on the hub is fetched when its stage begins.
        if not is_made(path) and not hub.is_hub_name(path, place):
            data_files(place)


def _opening(
    stage: Placed,
    stages: Sequence[Placed],
    overrides: Sequence[str],
    known: Sequence[str],
    fresh: bool = False,
) -> Opening:
    begun = (stage.folder / "run.json").exists() and not fresh
    # A run that has begun knows the settings of its earlier starts.
    words = words_of(stage, overrides if begun else [*known, *overrides], stages)
    try:
        return open_folder(stage.preset, words, fresh=fresh)
    except ConfigError as error:
        raise ConfigError(f"stage {stage.label}: {error}") from None


def _run(
    stage: Placed,
    stages: Sequence[Placed],
    overrides: Sequence[str],
    known: Sequence[str],
    again: str,
    plain: bool,
) -> int:
    opening = _opening(stage, stages, overrides, known)
    return run_job(stage.preset, opening, Terminal(plain=plain), again=again)


def _move_aside(top: RunFolder, labels: Sequence[str], terminal: Terminal) -> None:
    """Moves the folder of all stages, none of which may be running."""
    locks = [FolderLock(top)]
    locks += [FolderLock(RunFolder(top.path / n)) for n in labels if (top.path / n).is_dir()]
    try:
        for lock in locks:
            lock.take()
        aside = free_name(top.path)
        for lock in locks:
            lock.release_term()
        os.rename(top.path, aside)
    finally:
        for lock in locks:
            lock.release()
    terminal.say(f"{shown(top.path)} is now {shown(aside)}")


def _sum_up(
    preset: Preset,
    overrides: Sequence[str],
    stages: Sequence[Placed],
    top: RunFolder,
    terminal: Terminal,
) -> int:
    from ...board.report import Drawing

    summaries = {}
    for stage in stages:
        path = RunFolder(stage.folder).summary
        summaries[stage.label] = read_object(path.read_bytes(), str(path), DataError)
    made = summary.of_stages(preset.name, overrides, summaries)
    disk.persist(top.summary, lambda: summary.write(top, made))
    drawing = Drawing(top)
    problem = drawing.wait()
    for line in summary.stages_table(made, top):
        terminal.say(line)
    if problem:
        terminal.say(f"the report wasn't drawn: {problem}")
    return 128 + signal.SIGINT if drawing.interrupted else 0
