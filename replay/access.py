"""What a run asks of a Redis that others use as well: the commands, keys and channels, and nothing else.

The commands include those within scripts, since an ACL applies there, too. docs/redis.md has them as a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError

from .connection import Store

PATTERN = "tandem:*"
"""What the names of all keys and channels of all runs begin with."""
KEY = object()
"""Stands for a key of the run that no run uses."""

COMMANDS: dict[str, tuple[Any, ...]] = {
    "bitcount": (KEY,),
    "client|setname": ("tandem:check",),
    "dbsize": (),
    "del": (KEY,),
    "eval": ("return 1", 1, KEY),
    "evalsha": ("0" * 40, 1, KEY),
    "exists": (KEY,),
    "expire": (KEY, 60),
    "get": (KEY,),
    "getrange": (KEY, 0, 0),
    "hdel": (KEY, "f"),
    "hexists": (KEY, "f"),
    "hget": (KEY, "f"),
    "hgetall": (KEY,),
    "hincrby": (KEY, "f", 1),
    "hkeys": (KEY,),
    "hmget": (KEY, "f"),
    "hset": (KEY, "f", "0"),
    "hsetnx": (KEY, "f", "0"),
    "hvals": (KEY,),
    "info": ("server",),
    "llen": (KEY,),
    "lrange": (KEY, 0, 0),
    "ltrim": (KEY, 0, 0),
    "memory|usage": (KEY,),
    "mget": (KEY,),
    "multi": (),
    "exec": (),
    "persist": (KEY,),
    "publish": (KEY, ""),
    "rename": (KEY, KEY),
    "rpush": (KEY, "v"),
    "sadd": (KEY, "m"),
    "scan": (0, "COUNT", 1),
    "select": (),
    "set": (KEY, "v"),
    "setbit": (KEY, 0, 0),
    "smembers": (KEY,),
    "strlen": (KEY,),
    "time": (),
    "unlink": (KEY,),
    "zadd": (KEY, 0, "m"),
    "zcard": (KEY,),
    "zcount": (KEY, 0, 0),
    "zincrby": (KEY, 0, "m"),
    "zrange": (KEY, 0, 0),
    "zrangebyscore": (KEY, 0, 0),
    "zrem": (KEY, "m"),
    "zremrangebyrank": (KEY, 0, 0),
    "zremrangebyscore": (KEY, 0, 0),
    "zrevrange": (KEY, 0, 0),
    "zscore": (KEY, "m"),
    # The last one, since the connection can do nothing else afterwards.
    "subscribe": (KEY,),
}
"""Every command, as an ACL names it, with arguments by which it does nothing that lasts."""


def rule(pattern: str = PATTERN) -> str:
    """The ACL rule that suffices, without the user's name and password."""
    allowed = " ".join(f"+{name}" for name in sorted(COMMANDS))
    return f"resetkeys ~{pattern} resetchannels &{pattern} -@all {allowed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """What an ACL doesn't permit."""

    commands: tuple[str, ...] = ()
    """Names as in :data:`COMMANDS`."""
    keys: bool = False
    """The run's keys."""
    channels: bool = False
    """The run's channels."""

    def __bool__(self) -> bool:
        return bool(self.commands) or self.keys or self.channels

    def text(self) -> str:
        """The same in words."""
        named = [f"the commands {', '.join(self.commands)}"] if self.commands else []
        named += [f"keys {PATTERN}"] if self.keys else []
        named += [f"channels {PATTERN}"] if self.channels else []
        return "; ".join(named)

    def rule(self) -> str:
        """The rules that have to be added."""
        words = [f"~{PATTERN}"] if self.keys else []
        words += [f"&{PATTERN}"] if self.channels else []
        return " ".join([*words, *(f"+{name}" for name in self.commands)])


def denied(store: Store) -> Denied:
    """What this connection's user may not do of all that a run does. Each command is tried.

    Raises:
        StoreError: Redis doesn't answer.
    """
    client = store.redis
    name = store.key("check")

    def attempt() -> list[Any]:
        pipeline = client.pipeline(transaction=False)
        # Beforehand: while it subscribes, a connection takes no other command.
        for command, arguments in COMMANDS.items():
            words = [name if one is KEY else one for one in arguments]
            if command == "select":
                words = [client.get_connection_kwargs().get("db", 0)]
            if command == "subscribe":
                pipeline.execute_command("DEL", name)
            pipeline.execute_command(*command.upper().split("|"), *words)
        return list(pipeline.execute(raise_on_error=False))

    try:
        answers = store.persist("what the ACL permits", attempt)
    finally:
        # This one has subscribed and can do nothing else.
        client.connection_pool.disconnect()
    # The one before the last is of the clean-up.
    told = zip(COMMANDS, [*answers[:-2], answers[-1]], strict=True)
    # Without EXEC, a transaction ends with an error of its own that holds this one.
    refused = {
        command: str(one)
        for command, one in told
        if isinstance(one, NoPermissionError) or "NOPERM" in str(one)
    }
    commands = tuple(command for command, why in refused.items() if "access" not in why)
    return Denied(
        commands=commands,
        keys=any("access" in why and "channel" not in why for why in refused.values()),
        channels=any("channel" in why for why in refused.values()),
    )
