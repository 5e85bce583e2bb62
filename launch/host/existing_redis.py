"""The server that ``replay.redis_url`` names: how it is joined, and whether a run can trust its ledger to it.

Only questions are asked: nothing of the server's settings is changed, and no key but the run's own is touched.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ...common.errors import HeldError, StoreError
from ...common.run_folder import JoinInfo
from . import redis_server

if TYPE_CHECKING:
    import redis

    from ...common.config import ReplayConfig
    from ...replay.connection import Store

ANSWER_SECONDS = 3.0
"""How long the server may take for its first answer."""
OTHERS_SECONDS = 8.0
"""Several heartbeats: who is silent for longer has ended."""
LOOK_SECONDS = 0.25
ENDING_SECONDS = 2.0
"""So long after it was killed, a supervisor's children may still be there."""
FULL = 0.75
"""Share of ``maxmemory`` at which leases stop."""
OF_A_SUPERVISOR = re.compile(r"(learner|rollout|reward|environments)-\d+")
"""Ids of the members that a run's `tandem start` starts itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that may be used."""

    version: str
    """Version of Redis, or the one that Valkey says it is compatible with."""
    notes: tuple[str, ...]
    """What the user should know of it, a sentence each."""


def joining(replay: ReplayConfig, run_id: str, kept: JoinInfo | None) -> tuple[JoinInfo, str]:
    """How a run joins the server, and its URL without the password.

    Args:
        replay: settings with a ``redis_url``.
        kept: how the run joined it before; its password is used if no other one is given.

    Raises:
        ConfigError: it isn't a Redis URL.
    """
    assert replay.redis_url is not None
    join, url = redis_server.parse_url(replay.redis_url, run_id, kept)
    files = {"ca": replay.redis_ca, "cert": replay.redis_cert, "key": replay.redis_key}
    placed = {name: str(Path(path).expanduser().absolute()) for name, path in files.items() if path}
    return structs.replace(join, **placed), url


def check(join: JoinInfo, durability: str, *, new: bool, filled: bool) -> Server:
    """Checks the server, before anything is written or started.

    Args:
        join: how it is joined.
        durability: ``replay.durability``.
        new: the run has never been started.
        filled: the run has put its data there before.

    Raises:
        StoreError: it isn't reachable, can't be trusted or refuses this user; it is too old, a cluster, a replica or
            a sentinel; it would throw keys away, or forget them; it permits too little; it holds another run of this
            id, or no longer holds this one.
        HeldError: another `tandem start` runs it.
    """
    where = f"Redis at {join.host}:{join.port}"
    first = redis_server.wait_ready(join, deadline=ANSWER_SECONDS)
    version = str(first["redis_version"])
    if tuple(map(int, version.split(".")[:2])) < redis_server.OLDEST:
        raise StoreError(f"{where} is {version}: Tandem needs 6.2 or newer")
    _check_mode(where, str(first.get("redis_mode", "standalone")))
    import redis

    from ...replay.connection import connect

    client = redis_server.client(join)
    try:
        info = client.info()
        sync = _appendfsync(client)
    except redis.RedisError as error:
        raise StoreError(f"{where} refused INFO: {error}") from None
    finally:
        client.close()
    _check_role(where, info)
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise StoreError(
            f"{where} has maxmemory-policy {policy} and would throw groups away: set "
            f"`maxmemory-policy noeviction` there, or use a server of which nobody wants another policy"
        )
    notes = (_persistence(where, info, sync, durability), _fullness(where, info))
    store = connect(join, deadline=ANSWER_SECONDS, name="check")
    try:
        _check_access(where, join, store)
        _check_ledger(where, join, store, new=new, filled=filled)
    finally:
        store.close()
    return Server(version=version, notes=tuple(note for note in notes if note))


def _check_mode(where: str, mode: str) -> None:
    if mode == "cluster":
        raise StoreError(
            f"{where} is a node of a cluster, and a run's keys must be on one server: name a server of "
            f"its own (redis_mode standalone)"
        )
    if mode == "sentinel":
        raise StoreError(
            f"{where} is a sentinel, which holds no keys: name the server that it watches"
        )


def _check_role(where: str, info: dict[str, Any]) -> None:
    if info.get("role") in ("slave", "replica"):
        raise StoreError(
            f"{where} is a replica of {info.get('master_host')}:{info.get('master_port')}, to which "
            f"nobody can write: name that one"
        )


def _appendfsync(client: redis.Redis) -> str | None:
    """The server's ``appendfsync``; None where this user may not ask."""
    from redis import ResponseError
    from redis.utils import str_if_bytes

    try:
        found: dict[Any, Any] = client.config_get("appendfsync")
    except ResponseError:
        # Forbidden by an ACL, or a hosted server that has no CONFIG.
        return None
    return next(map(str_if_bytes, found.values()), None)


def _persistence(where: str, info: dict[str, Any], sync: str | None, durability: str) -> str | None:
    """A note on what the server keeps when it is killed; raises ``StoreError`` where that is too little."""
    loss = "a run that has trained on what is lost can't go on, only its model be exported"
    if not info.get("aof_enabled"):
        loses = (
            "loses the run's ledger when it is restarted, or all that came after its last snapshot"
        )
        if durability == "server":
            return f"{where} has appendonly off and {loses}: {loss}"
        raise StoreError(
            f"{where} has appendonly off and {loses}: set `appendonly yes` and `appendfsync no` or `always` "
            f"there, or take it as it is with replay.durability=server"
        )
    enough = ("always",) if durability == "power" else ("always", "no")
    if sync in enough:
        return None
    wanted = " or ".join(f"`appendfsync {one}`" for one in enough)
    if sync is None and durability != "power":
        return (
            f"{where} doesn't let this user ask for appendfsync (CONFIG GET): it should be {wanted}. With "
            f"everysec, its last second may be lost when it is killed, and {loss}"
        )
    if durability == "server":
        return f"{where} has appendfsync {sync}: its last second may be lost when it is killed, and {loss}"
    policy = (
        f"has appendfsync {sync}"
        if sync
        else "doesn't let this user ask for appendfsync (CONFIG GET)"
    )
    raise StoreError(
        f"{where} {policy}, and replay.durability={durability} wants every acknowledged write kept: set {wanted} "
        f"there{'' if sync else ' and permit +config|get'}, or take it as it is with replay.durability=server"
    )


def _fullness(where: str, info: dict[str, Any]) -> str | None:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not most or used <= FULL * most:
        return None
    return (
        f"{where} is full to {used / most:.0%} of its maxmemory, others' keys included, and no group is "
        f"leased above {FULL:.0%}: raise maxmemory there, or make room"
    )


def _check_access(where: str, join: JoinInfo, store: Store) -> None:
    from ...replay.access import denied

    found = denied(store)
    if found:
        user = join.username or "default"
        raise StoreError(
            f"{where} doesn't permit the user {user} what a run needs ({found.text()}): give it `ACL SETUSER "
            f"{user} {found.rule()}`, or the whole rule of docs/redis.md"
        )


def _check_ledger(where: str, join: JoinInfo, store: Store, *, new: bool, filled: bool) -> None:
    held = store.holds_run()
    if new and held:
        raise StoreError(
            f"{where}, database {join.db}, holds another run of the id {join.run_id}: start again, which "
            f"draws another id (where launch.join gives it, make that file anew), or go on with that run in its "
            f"own folder"
        )
    if filled and not held:
        raise StoreError(
            f"{where}, database {join.db}, holds no ledger of run {join.run_id}: name the server and database "
            f"with which it was begun in replay.redis_url, or start over with --fresh (the folder is "
            f"moved aside)"
        )
    if held and (other := _somebody_else(store)):
        raise HeldError(
            f"run {join.run_id} in {where} is under way elsewhere: its {other} is alive, and this folder's "
            f"lock is free. This is a copy of the folder of that run: end that one first, or start over "
            f"with --fresh"
        )


def _somebody_else(store: Store) -> str | None:
    """A member of another `tandem start` that beats while this one has not started any; else None.

    After a supervisor was killed, the last heartbeats of its children are waited out.
    """
    from ...replay.members import Members

    members = Members(store)
    end = time.monotonic() + OTHERS_SECONDS

    def ages() -> dict[str, float]:
        live = members.live(within=OTHERS_SECONDS)
        return {one.member: one.age for one in live if OF_A_SUPERVISOR.fullmatch(one.member)}

    before = ages()
    while before and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        now = ages()
        # Without another heartbeat, it would be older by as long as was slept.
        younger = {name: before.get(name, 0.0) + LOOK_SECONDS / 2 for name in now}
        again = sorted(name for name, age in now.items() if age < younger[name])
        if again and end - time.monotonic() < OTHERS_SECONDS - ENDING_SECONDS:
            return again[0]
        before = now
    return None
