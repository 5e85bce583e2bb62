"""Opens a run's folder: new, resumed, finished, or moved aside to start over. Never wipes one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import ConfigError, DataError
from ..common.run_folder import RunFolder
from .presets import Preset
from .redis_server import without_password

if TYPE_CHECKING:
    from ..common.config import Config

OWN_ENTRIES = frozenset(
    [
        "config.yaml",
        "run.json",
        "join.json",
        "lock",
        "metrics.jsonl",
        "samples.jsonl",
        "journal.jsonl",
        "summary.json",
        "model",
        "checkpoints",
        "logs",
        "redis",
        "data",
        "wandb",
        "tensorboard",
        "trackers",
    ]
)
"""What a run's folder may hold before its ``run.json`` is written."""


class Kind(Enum):
    """What a folder turned out to be."""

    NEW = "new"
    RESUMED = "resumed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A folder and the config that a run in it would have. Nothing has been written yet."""

    kind: Kind
    """New, to be resumed, or finished."""
    folder: RunFolder
    """The run's folder."""
    config: Config
    """As it will be saved."""
    overrides: tuple[str, ...]
    """All that were ever given for this run, in order."""
    changed: dict[str, tuple[Any, Any]]
    """Settings that differ from the saved ones: old and new."""
    run: dict[str, Any]
    """``run.json`` as it is; empty for a new run."""
    set_aside: Path | None
    """Where ``--fresh`` will move the old folder."""

    @property
    def run_id(self) -> str:
        """The run's id, a new one for a new run."""
        return str(self.run["run_id"])


def open_folder(preset: Preset, overrides: Sequence[str], *, fresh: bool) -> Opening:
    """Looks at the folder that a preset and overrides name, and writes nothing.

    A resumed run starts from its preset with the overrides that it was given before; new ones
    go over them. So a bare ``tandem start`` goes on with ``run.steps=20`` if that is how the
    run was started.

    Raises:
        ConfigError: a setting changed that a resumed run may not change; lists all of them.
        DataError: the folder holds something else than a run.
    """
    config = preset.resolve(overrides)
    assert config.run.dir is not None
    folder = RunFolder(config.run.dir)
    if folder.path.exists() and not folder.path.is_dir():
        raise DataError(f"{_shown(folder.path)} is a file: name another folder with run.dir=…")
    new = {"run_id": secrets.token_hex(6), "preset": preset.name}
    run = folder.read_run()
    if not run:
        _refuse_foreign(folder)
        return Opening(
            kind=Kind.NEW,
            folder=folder,
            config=config,
            overrides=tuple(overrides),
            changed={},
            run=new,
            set_aside=None,
        )
    if fresh:
        return Opening(
            kind=Kind.NEW,
            folder=folder,
            config=config,
            overrides=tuple(overrides),
            changed={},
            run=new,
            set_aside=free_name(folder.path),
        )
    before = _given_before(preset, run)
    config = preset.resolve([*before, *overrides])
    saved = _saved(folder)
    changed = _differences(saved, config)
    frozen = _frozen(saved, config)
    if frozen:
        listed = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in frozen.items())
        raise ConfigError(
            f"the run in {_shown(folder.path)} can't go on with other values of what it is made "
            f"of ({listed}): leave them as they were, name another folder (run.dir=…), or start "
            f"over with --fresh (the old folder is moved aside)"
        )
    return Opening(
        kind=Kind.FINISHED if _is_finished(run, changed) else Kind.RESUMED,
        folder=folder,
        config=config,
        overrides=(*before, *overrides),
        changed=changed,
        run=run,
        set_aside=None,
    )


def _given_before(preset: Preset, run: dict[str, Any]) -> list[str]:
    """The overrides that a run was started and resumed with, if it was with this preset.

    Where its preset's file is gone, as on another machine, one of the same name is it. The folder is
    the one that was named this time, wherever the run was before.
    """
    path = Path(str(run.get("preset_path")))
    moved = run.get("preset") == preset.name and not path.exists()
    if path != preset.path and not moved:
        return []
    words = [str(word) for word in run.get("overrides", [])]
    return [word for word in words if word.partition("=")[0].strip() != "run.dir"]


def _is_finished(run: dict[str, Any], changed: dict[str, tuple[Any, Any]]) -> bool:
    """Whether a run is over: one that was given more steps or passes goes on."""
    if run.get("state") != "finished":
        return False
    for key in ("run.steps", "run.passes"):
        old, new = changed.get(key, (None, None))
        if old is not None and new is not None and new > old:
            return False
    return True


def _saved(folder: RunFolder) -> Config:
    from ..common.config import build, read_yaml

    if not folder.config.exists():
        raise DataError(
            f"{_shown(folder.config)} is missing: restore it, or start over with --fresh"
        )
    return build(read_yaml(folder.config))


def _differences(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    from ..common.config import differences

    replay = config.replay.model_copy(
        update={"redis_url": without_password(config.replay.redis_url)}
    )
    found = differences(saved, config.model_copy(update={"replay": replay}))
    # The same folder may be written in several ways; that it is the same was seen by opening it.
    found.pop("run.dir", None)
    return found


def _frozen(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    from ..common.config import frozen_differences

    return frozen_differences(saved, config)


def _refuse_foreign(folder: RunFolder) -> None:
    if not folder.path.exists():
        return
    others = sorted(
        entry.name
        for entry in os.scandir(folder.path)
        if entry.name not in OWN_ENTRIES and not entry.name.startswith(".")
    )
    if others:
        raise DataError(
            f"{_shown(folder.path)} holds something else than a run ({', '.join(others[:3])}"
            f"{', …' * (len(others) > 3)}): name another folder with run.dir=…"
        )
    if folder.journal.exists() or any(folder.redis.glob("*.aof*")):
        raise DataError(
            f"{_shown(folder.path)} holds a run whose run.json is missing: restore it, or name "
            f"another folder with run.dir=…"
        )


def free_name(path: Path) -> Path:
    """The first of ``path.1``, ``path.2`` … that doesn't exist."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return aside


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
