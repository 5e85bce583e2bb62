"""The Redis of a run: one that the run starts in its own folder, or the one that ``replay.redis_url`` names."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from ....common.errors import ConfigError, DamagedError, StoreError
from ....common.run_folder import JoinInfo, RunFolder, read_join
from ...host import existing_redis, redis_server
from ...wording import shown
from ..opened.opening import Kind
from . import roles
from .parts import Part, ProcessSpec, Stage, last_lines

if TYPE_CHECKING:
    from ....common.config import Config
    from ...host.folder_lock import FolderLock
    from ..opened.opening import Opening
    from ..opened.record import RunRecord
    from .supervision import Supervisor

REDIS_SECONDS = 120.0
"""How long redis-server may take to load its append-only file and answer."""


def where(
    opening: Opening, record: RunRecord, say: Callable[[str], None]
) -> tuple[JoinInfo, Config]:
    """How the run's Redis will be joined, and the config without a password.

    An existing Redis is contacted here; nothing is written or started.

    Raises:
        StoreError: the existing Redis can't be used.
        TandemError: there is no redis-server on this host.
    """
    config, folder = opening.config, opening.folder
    kept = read_join(folder.join) if folder.join.exists() else None
    if opening.set_aside is not None:
        kept = None
    given = _given(opening)
    before = record.get("folder")
    moved = before not in (None, os.path.realpath(folder.path))
    if config.replay.redis_url is not None:
        if moved:
            say(
                f"note: this folder was {before}, and its ledger is in the Redis of "
                f"replay.redis_url: if it is a copy, let only one of them go on"
            )
        join, url = existing_redis.joining(config.replay, opening.run_id, given or kept)
        new = opening.kind is Kind.NEW
        filled = not new and record.get("ingest") is not None
        server = existing_redis.check(join, config.replay.durability, new=new, filled=filled)
        if redis_server.password_in(config.replay.redis_url):
            say(redis_server.PASSWORD_NOTE)
        for note in server.notes:
            say(f"note: {note}")
        record.note(redis_version=server.version)
        replay = config.replay.model_copy(update={"redis_url": url})
        return join, config.model_copy(update={"replay": replay})
    redis_server.find()
    bind = config.launch.bind
    # If every address is bound, this host's own processes use loopback.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
    if given is not None:
        kept = given
    elif moved and kept is not None:
        # A copy and its original must never be mistaken for each other, whichever starts first.
        say(
            f"note: this folder was {before}: Redis gets another password and port here, and "
            f"members on other hosts need a new file from `tandem join-file`"
        )
        kept = None
    port = redis_server.redis_port(bind, kept.port if kept else None, config.launch.port_range)
    if kept is not None and kept.run_id == opening.run_id:
        if port != kept.port and given is not None:
            raise ConfigError(
                f"Redis is to listen on port {kept.port}, as launch.join={config.launch.join} says, and "
                f"{f'launch.ports={config.launch.ports} begins with another' if config.launch.ports else 'it is taken'}"
                f"{redis_server.holder_of(kept.port)}: free it, or make that file anew"
            )
        if port != kept.port:
            say(
                f"note: port {kept.port} is taken, Redis listens on {port}: members on other "
                f"hosts need a new file from `tandem join-file`"
            )
        return structs.replace(kept, host=host, port=port), config
    password = redis_server.new_password()
    return JoinInfo(run_id=opening.run_id, host=host, port=port, password=password), config


def _given(opening: Opening) -> JoinInfo | None:
    """The join file that was made beforehand.

    Raises:
        ConfigError: it is of another run than the folder.
    """
    file = opening.config.launch.join
    if file is None:
        return None
    given = read_join(Path(file).expanduser())
    if given.run_id != opening.run_id:
        raise ConfigError(
            f"launch.join={file} is of run {given.run_id}, and {shown(opening.folder.path)} holds run "
            f"{opening.run_id}: name the file with which it was begun, or another folder with run.dir=…"
        )
    return given


def part(
    config: Config,
    folder: RunFolder,
    join: JoinInfo,
    lock: FolderLock,
    *,
    before_end: Callable[[], None],
    say: Callable[[str], None],
) -> Part | None:
    """The run's own redis-server; None if the run uses an external one.

    Args:
        join: its port and password.
        lock: the folder's lock, which the server inherits.
        before_end: called while the server can still be queried.
        say: prints what had to be repaired.
    """
    if config.replay.redis_url is not None:
        return None
    program = redis_server.find()
    if not folder.redis.is_dir():
        raise DamagedError(f"the ledger in {shown(folder.redis)} is gone: {_rescue(folder)}")
    conf = redis_server.write_conf(folder, join, config.replay, config.launch.bind)

    def specs() -> list[ProcessSpec]:
        if mended := redis_server.mend(folder):
            say(f"warning: {mended}; what the ledger lacks is repaired from the journal")
        spec = roles.redis(folder, str(program.path), str(conf))
        return [replace(spec, pass_fds=(lock.fileno(),))]

    return Part(
        name="redis",
        stage=Stage.REDIS,
        specs=specs,
        on_start=lambda pids: lock.name_redis(pids[0]),
        before_end=before_end,
    )


def _rescue(folder: RunFolder) -> str:
    """What can be done without the ledger."""
    # Imported here so that not every supervisor loads DeepSpeed.
    from ....learner.resume.checkpoints import what_is_left

    return f"restore it from a copy of the run's folder. {what_is_left(folder)}"


def await_ready(
    server: Part | None, supervisor: Supervisor, folder: RunFolder, join: JoinInfo
) -> str | None:
    """Starts the run's own server, if it has one, and waits until Redis answers.

    Returns:
        The version of Redis; None if somebody asks the run to stop in the meantime.

    Raises:
        DamagedError: the server can't read its file.
        StoreError: Redis doesn't answer.
    """
    if server is None:
        return str(redis_server.wait_ready(join, deadline=REDIS_SECONDS)["redis_version"])
    supervisor.start(server)
    log = folder.logs / "redis.log"
    try:
        info = redis_server.wait_ready(
            join,
            deadline=REDIS_SECONDS,
            alive=lambda: server.alive() and not supervisor.stop_requested,
        )
    except StoreError as error:
        if supervisor.stop_requested:
            return None
        if redis_server.says_damaged(last_lines(log)):
            said = f"redis-server can't read the ledger in {shown(folder.redis)}, it is damaged"
            raise DamagedError(f"{said}: {_rescue(folder)}. Its log is {shown(log)}") from None
        raise StoreError(f"{error}; the last lines of {shown(log)}:\n{last_lines(log)}") from None
    conf = folder.redis / "redis.conf"
    if Path(info.get("config_file") or conf) != conf:
        raise StoreError(
            f"port {join.port} was taken by another redis-server ({info['config_file']}) just "
            f"now: start again"
        )
    return str(info["redis_version"])
