"""Runs that one command makes one after another: SFT and then RL, or the rounds of expert iteration.

Each stage is an ordinary run in a folder of its own below the preset's (:mod:`.placing`). ``stages.json`` in the
common folder says which runs belong together and how they were asked for; everything else is in the runs themselves,
so that a command that is given again goes on wherever the last one ended.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from ....common import disk
from ....common.errors import ConfigError, DataError, TandemError
from ....common.plain import read_object
from ....common.run_folder import RunFolder, write_atomic
from ...board.lines import await_reader
from ...board.terminal import Terminal
from ...host.folder_lock import FolderLock
from ...host.preflight import check_critic, check_model, check_teacher
from ...wording import shown
from .. import summary
from ..ending import was_stopped
from ..job import command_again, run_job
from ..opened.opening import Kind, Opening, free_name, open_folder, open_preset, open_run
from ..opened.presets import Preset
from ..opened.record import as_kept
from .placing import Placed, begun_before, folder_of, placed, setting_of, still_named, words_of


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
    before = begun_before(top, preset)
    if before is not None and fresh:
        _open(placed(preset, overrides), overrides, [], fresh=True)
        _move_aside(top, before["stages"], terminal)
        before = None
    known = before["overrides"] if before is not None else []
    words = [*known, *overrides]
    stages = placed(preset, words)
    known = still_named(known, stages)
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
            "overrides": [word for word in kept if setting_of(word) != "run.dir"],
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
