"""Opens a run's folder: new, resumed, finished, or moved aside to start over. Never wipes one."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....common.errors import ConfigError, DataError, TandemError
from ....common.parts import is_part, parts
from ....common.run_folder import RunFolder, read_join
from ...host.folder_lock import FolderLock
from ...host.redis_server import without_password
from ...wording import shown
from .presets import Preset, from_kept, load, split

if TYPE_CHECKING:
    from ....common.config import Config

OWN_ENTRIES = frozenset(
    [
        "config.yaml",
        "run.json",
        "join.json",
        "head",
        "lock",
        "metrics.jsonl",
        "samples.jsonl",
        "cut",
        "journal.jsonl",
        "summary.json",
        "model",
        "adapter",
        "checkpoints",
        "logs",
        "redis",
        "data",
        "wandb",
        "tensorboard",
        "trackers",
    ]
)
"""Entries that a run's folder may hold before its ``run.json`` is written."""


class Kind(Enum):
    """What a folder turned out to be."""

    NEW = "new"
    RESUMED = "resumed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A folder and the config that a run in it would have. Nothing has been written yet."""

    kind: Kind
    folder: RunFolder
    config: Config
    """The config that will be saved."""
    overrides: tuple[str, ...]
    """All overrides ever given for this run, in order."""
    changed: dict[str, tuple[Any, Any]]
    """Settings that differ from the saved ones: key to old and new value."""
    kept: tuple[str, ...] = ()
    """Settings that the run keeps as it began with them, where its preset has others by now."""
    run: dict[str, Any]
    """Content of ``run.json``; empty for a new run."""
    set_aside: Path | None
    """The path to which ``--fresh`` will move the old folder."""

    @property
    def run_id(self) -> str:
        """The run's id, a new one for a new run."""
        return str(self.run["run_id"])


def open_preset(words: Sequence[str], *, offline: bool) -> tuple[Preset, list[str]]:
    """The preset that the words of a command line name (by default the miniature), and the overrides."""
    name, overrides = split(words, "miniature-sft" if offline else "miniature")
    return load(name), overrides


def open_run(preset: Preset, overrides: Sequence[str], *, fresh: bool, offline: bool) -> Opening:
    """The folder of a preset's run; writes nothing.

    Keys of the preset that the run doesn't read are listed on standard error.

    Args:
        preset: a single run.
        overrides: settings that go over it.
        fresh: an old folder is to be moved aside.
        offline: the preset must train on what is stored.

    Raises:
        ConfigError: as :func:`open_folder`; or the preset trains on rollouts.
        DataError: as :func:`open_folder`.
    """
    opening = open_folder(preset, overrides, fresh=fresh)
    if offline and opening.config.learner.source != "offline":
        raise ConfigError(
            f"preset {preset.name} trains on rollouts (learner.source=ledger): "
            f"`tandem start {preset.name}` runs it, or set learner.source=offline"
        )
    preset.tell_unread(overrides)
    return opening


def open_folder(preset: Preset, overrides: Sequence[str], *, fresh: bool) -> Opening:
    """Examines the folder that a preset and overrides name; writes nothing.

    A resumed run starts from its preset with all overrides that it was given before; new ones
    go on top. So a bare ``tandem start`` continues with ``run.steps=20`` if the run was started
    that way. Where a later version ships the preset with other settings that a resumed run may
    not change, the run keeps all settings that it began with.

    Raises:
        ConfigError: settings changed that a resumed run may not change (the message lists all of
            them), would do nothing, or would fail once the run is under way.
        DataError: the folder holds something other than a run.
    """
    config = preset.resolve(overrides)
    assert config.run.dir is not None
    folder = RunFolder(config.run.dir)
    if folder.path.exists() and not folder.path.is_dir():
        raise DataError(f"{shown(folder.path)} is a file: name another folder with run.dir=…")
    may_start = partial(_refuse_choices, preset, overrides)
    given = config.launch.join
    run_id = secrets.token_hex(6) if given is None else read_join(Path(given).expanduser()).run_id
    new = {"run_id": run_id, "preset": preset.name}
    run = folder.read_run()
    if fresh or not run:
        may_start(config)
        if not run:
            _refuse_foreign(folder)
        return Opening(
            kind=Kind.NEW,
            folder=folder,
            config=config,
            overrides=tuple(overrides),
            changed={},
            run=new,
            set_aside=free_name(folder.path) if run else None,
        )
    before = _given_before(preset, run)
    config = preset.resolve(overrides, before=before)
    saved = _saved(folder)
    if kept := _objective_as_begun(saved, config, [*before, *overrides]):
        before += kept
        config = preset.resolve(overrides, before=before)
    as_begun = {}
    if _frozen(saved, config) and preset.is_shipped and _is_of(preset, run):
        as_begun = _preset_as_begun(saved, preset, overrides, before)
    if as_begun:
        before = [*(f"{key}={value}" for key, value in as_begun.items()), *before]
        config = preset.resolve(overrides, before=before)
    changed = _differences(saved, config)
    frozen = _frozen(saved, config)
    if frozen:
        listed = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in frozen.items())
        raise ConfigError(
            f"the run in {shown(folder.path)} can't go on with other values of settings that "
            f"shaped it ({listed}): leave them as they were, name another folder (run.dir=…), or start "
            f"over with --fresh (the old folder is moved aside)"
        )
    finished = _is_finished(run, changed)
    if not finished:
        may_start(config, anew=False)
    return Opening(
        kind=Kind.FINISHED if finished else Kind.RESUMED,
        folder=folder,
        config=config,
        overrides=(*before, *overrides),
        changed=changed,
        kept=tuple(as_begun),
        run=run,
        set_aside=None,
    )


def _refuse_choices(
    preset: Preset, overrides: Sequence[str], config: Config, *, anew: bool = True
) -> None:
    from ....common.config.checks.choices import why_not_started
    from .choices import check_named

    try:
        if refusal := why_not_started(config, anew=anew):
            raise ConfigError(refusal)
        if anew and config.run.deterministic:
            _refuse_undone(overrides)
        check_named(config)
    except ConfigError as error:
        raise ConfigError(str(error) if overrides else f"{preset.path}: {error}") from None


def _refuse_undone(overrides: Sequence[str]) -> None:
    """Refuses overrides that ``run.deterministic=true`` undoes."""
    from ....common.config import DETERMINISTIC, parse_override

    given = dict(map(parse_override, overrides))
    for key, made in DETERMINISTIC.items():
        if given.get(key, made) != made:
            raise ConfigError(
                f"{key}={given[key]} goes against run.deterministic=true, which sets it to {made}: leave one of them out"
            )


def _objective_as_begun(saved: Config, config: Config, words: Sequence[str]) -> list[str]:
    """Overrides that keep what a run has from its preset where the objective's name would set it otherwise.

    Older versions kept a preset's settings under whatever objective was named over it.
    """
    from ....common.objectives import sets

    old, new = saved.learner.objective, config.learner.objective
    if old.name != new.name:
        return []
    given = {word.partition("=")[0].strip() for word in words}
    changed = {
        f"learner.objective.{key}": getattr(old, key)
        for key in sets(type(new))
        if getattr(old, key) != getattr(new, key)
    }
    return [
        f"{key}={'null' if value is None else value}"
        for key, value in changed.items()
        if key not in given
    ]


def _preset_as_begun(
    saved: Config, preset: Preset, overrides: Sequence[str], before: Sequence[str]
) -> dict[str, str]:
    """What a run has from an older version of its preset that the preset has otherwise by now: key to value, as
    overrides have them; empty where that is nothing that shaped the run, or can't be kept.

    Args:
        saved: the run's settings.
        preset: as it is now.
        overrides: settings of this start, which go over what is kept.
        before: those of earlier starts, which do, too.
    """
    from ....common.config import valid_keys

    if (
        Path(str(saved.run.dir)).absolute()
        != Path(preset.resolve(overrides).run.dir or "").absolute()
    ):
        # Stages name each other's folders, and those of a folder that was moved are others.
        return {}
    tree, whole = saved.model_dump(mode="json"), frozenset(valid_keys())
    kept: dict[str, str] = {}
    words: list[str] = []
    try:
        now = preset.resolve([], before=before)
        while _frozen(saved, now):
            found = len(kept)
            for key in _differences(saved, now):
                value, named = tree, ""
                for part in key.split("."):
                    # A list or a mapping is kept as a whole, and so is a section that only one of them has.
                    if named in whole or not isinstance(value, dict) or part not in value:
                        break
                    value, named = value[part], f"{named}.{part}".lstrip(".")
                kept[named] = json.dumps(value, ensure_ascii=False)
            if len(kept) == found:
                return {}
            # What an objective or engine of another name hid may differ, too.
            words = [f"{key}={value}" for key, value in kept.items()]
            now = preset.resolve([], before=[*words, *before])
        preset.resolve(overrides, before=[*words, *before])
    except ConfigError:
        return {}
    return kept


def _is_of(preset: Preset, run: dict[str, Any]) -> bool:
    """Whether a run was started from this preset.

    If the preset's file is gone, as on another machine, a preset of the same name counts as the same.
    """
    path = Path(str(run.get("preset_path")))
    return path == preset.path or (run.get("preset") == preset.name and not path.exists())


def _given_before(preset: Preset, run: dict[str, Any]) -> list[str]:
    """The overrides that a run was started and resumed with, if it was started from this preset.

    ``run.dir`` is left out: the folder is the one named this time, wherever the run was before.
    """
    if not _is_of(preset, run):
        return []
    words = [from_kept(str(word)) for word in run.get("overrides", [])]
    return [word for word in words if word.partition("=")[0].strip() != "run.dir"]


def _is_finished(run: dict[str, Any], changed: dict[str, tuple[Any, Any]]) -> bool:
    """Whether a run is over; one that was given more steps or passes continues, and so does one that a
    callback has stopped and that has other callbacks now."""
    if run.get("state") != "finished":
        return False
    if run.get("stopped") and "run.callbacks" in changed:
        return False
    before, now = changed.get("run.last_step", (None, None))
    if before is not None and (now is None or now > before):
        return False
    for key in ("run.steps", "run.passes"):
        old, new = changed.get(key, (None, None))
        if old is not None and new is not None and new > old:
            return False
    return True


def _saved(folder: RunFolder) -> Config:
    from ....common.config import build, read_yaml

    if not folder.config.exists():
        raise DataError(
            f"{shown(folder.config)} is missing: restore it, or start over with --fresh"
        )
    folder.check_config()
    try:
        return build(read_yaml(folder.config), stored=True)
    except ConfigError as error:
        message = str(error)
        named = folder.config.name in message
        raise ConfigError(message if named else f"{shown(folder.config)}: {message}") from None


def _differences(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    from ....common.config import differences

    replay = config.replay.model_copy(
        update={"redis_url": without_password(config.replay.redis_url)}
    )
    changed = differences(saved, config.model_copy(update={"replay": replay}))
    # One folder can be written in several ways; opening it has shown that it is the same.
    changed.pop("run.dir", None)
    return changed


def _frozen(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    from ....common.config import frozen_differences

    return frozen_differences(saved, config)


def _is_part(folder: RunFolder, entry: os.DirEntry[str]) -> bool:
    records = folder.journal, folder.metrics, folder.samples
    return any(is_part(path, entry.name) for path in records)


def _refuse_foreign(folder: RunFolder) -> None:
    if not folder.path.exists():
        return
    others = sorted(
        entry.name
        for entry in os.scandir(folder.path)
        if not (entry.name in OWN_ENTRIES or entry.name.startswith(".") or _is_part(folder, entry))
    )
    if parts(folder.journal) or any(folder.redis.glob("*.aof*")):
        raise DataError(
            f"{shown(folder.path)} holds a run whose run.json is missing: restore it, or name "
            f"another folder with run.dir=…"
        )
    if others:
        raise DataError(
            f"{shown(folder.path)} holds something other than a run ({', '.join(others[:3])}"
            f"{', …' * (len(others) > 3)}): name another folder with run.dir=…"
        )


def make_folder(opening: Opening, lock: FolderLock, say: Callable[[str], None]) -> None:
    """Makes a new run's folder and takes its lock; an old folder is moved aside first.

    Args:
        opening: a folder that is new, or whose run is started over.
        lock: the folder's lock, already held if the old folder is to be moved.
        say: prints where the old folder is now.

    Raises:
        TandemError: another process has begun a run there in the meantime.
    """
    folder = opening.folder
    begun_elsewhere = TandemError(
        f"{shown(folder.path)} was started by another process just now: look there with "
        f"`tandem status {shown(folder.path)}`"
    )
    if opening.set_aside is not None:
        if not folder.read_run():
            raise begun_elsewhere
        # Its lock is held: no run is using it, and nobody else can move it.
        aside = free_name(folder.path)
        lock.release_term()
        os.rename(folder.path, aside)
        lock.release()
        say(f"{shown(folder.path)} is now {shown(aside)}")
    folder.make()
    lock.take()
    if folder.read_run():
        raise begun_elsewhere


def free_name(path: Path) -> Path:
    """The first of ``path.1``, ``path.2`` … that doesn't exist."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside
