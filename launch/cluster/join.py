"""A join file that is made before the run is, where members get theirs with the manifest and not from the head."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from msgspec import structs

from ...common.errors import DataError
from ...common.plain import read_object, read_record, sealed, unsealed
from ...common.run_folder import JoinInfo
from ..host import existing_redis, redis_server

if TYPE_CHECKING:
    from ...common.config import Config

PORTS = "29500-29563"
"""``launch.ports`` where the preset says nothing: Tandem's listeners must be known to a policy beforehand."""
FIRST_SECONDS = 1800
"""How long a host that is started together with the head waits for it: a new run's reads its data before anything."""


def port_range(config: Config) -> range:
    """``launch.ports``, or the default of clusters."""
    first, last = map(int, (config.launch.ports or PORTS).split("-"))
    return range(first, last + 1)


def new_join(config: Config, host: str, kept: JoinInfo | None = None) -> JoinInfo:
    """How members will reach a run that isn't begun yet.

    Args:
        config: the run's.
        host: name or address by which members reach the head.
        kept: what an earlier call has made. A run may have been begun with its id and password, which stay.

    Raises:
        ConfigError: ``replay.redis_url`` isn't a Redis URL.
    """
    run_id = kept.run_id if kept is not None else secrets.token_hex(6)
    if config.replay.redis_url is not None:
        join, _ = existing_redis.joining(config.replay, run_id, None)
        if kept is not None and join.password is None and _server(kept) == _server(join):
            join = structs.replace(join, password=kept.password)
        return join
    password = kept.password if kept is not None else None
    return JoinInfo(
        run_id=run_id,
        host=host,
        port=port_range(config)[0],
        password=password or redis_server.new_password(),
    )


def note_on_password(config: Config, kept: JoinInfo | None, file: str) -> list[str]:
    """What is said of an existing Redis whose password members won't have, a sentence at most.

    Args:
        config: the run's.
        kept: what an earlier call has made.
        file: where the password would be.
    """
    if config.replay.redis_url is None or (join := new_join(config, "", kept)).password:
        return []
    note = (
        f"no password for Redis at {join.host}:{join.port} is known here, so {file} has none, and workers can't join if "
        f"that server wants one: export {redis_server.PASSWORD_VARIABLE} and call this again"
    )
    return [note]


def _server(join: JoinInfo) -> tuple[str, int, str | None]:
    """What a password belongs to."""
    return join.host, join.port, join.username


def text_of(join: JoinInfo) -> str:
    """The content of a join file."""
    return json.dumps(sealed(structs.asdict(join))) + "\n"


def read_kept(path: Path, *, in_secret: bool) -> JoinInfo | None:
    """The join file that an earlier call has made; None if there is none.

    Args:
        path: the file, or the manifest of a Secret that holds it.
        in_secret: which of both.

    Raises:
        DataError: it is damaged.
    """
    way_out = "move it away for a new one; a run that was begun with it can't be joined then"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    if in_secret:
        try:
            content: Any = yaml.safe_load(text)
            text = str(content["stringData"]["join.json"])
        except (yaml.YAMLError, KeyError, TypeError):
            raise DataError(f"{path} holds no join file: {way_out}") from None
    content = unsealed(
        read_object(text.encode(), str(path), DataError, way_out), str(path), DataError, way_out
    )
    return read_record(JoinInfo, content, str(path), DataError, way_out)
