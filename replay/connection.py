"""The connection to the run's Redis: waits, retries, and scripts that may be repeated safely."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    DataError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..common import disk
from ..common.errors import FencedError, FullError, RefusedError, StoreError
from ..common.run_folder import JoinInfo
from ..common.waiting import Wait
from .reaching import make_client, refusal

log = logging.getLogger("tandem.replay")

T = TypeVar("T")
Command = tuple[Any, ...]
Arg = str | int | float | bytes

DEADLINE = 60.0
"""Seconds during which a command is retried while Redis is down, loading, busy or full."""
WARN_FROM = 10.0
"""Waits with at least this deadline, in seconds, are logged at half of it."""
LARGEST_PAUSE = 0.5
SOCKET_TIMEOUT = 30.0
BRIEF_TIMEOUT = 1.0
"""Seconds for the answer to a command whose deadline is no longer than this."""
OLDEST_REDIS = (6, 2)

_WAITS = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, OutOfMemoryError)


@cache
def script_source(name: str) -> str:
    """The Lua text of ``scripts/<name>.lua``, preceded by the prelude."""
    folder = resources.files(__package__) / "scripts"
    body = (folder / f"{name}.lua").read_text(encoding="utf-8")
    return (folder / "prelude.lua").read_text(encoding="utf-8") + "\n" + body


@cache
def script_digest(name: str) -> str:
    """The SHA-1 by which Redis identifies the script."""
    return hashlib.sha1(script_source(name).encode()).hexdigest()


@cache
def script_names() -> tuple[str, ...]:
    """Names of all scripts except the prelude, sorted."""
    folder = resources.files(__package__) / "scripts"
    names = {entry.name.removesuffix(".lua") for entry in folder.iterdir()}
    return tuple(sorted(n for n in names if n != "prelude" and not n.startswith((".", "_"))))


class Store:
    """One process's access to the run's keys in Redis. Thread-safe.

    Every script call carries ``(caller, request number)``: a call that is repeated because its answer
    was lost gets its first answer again. So calls are simply retried until ``deadline`` while the
    connection is refused or lost, while Redis loads its file (``LOADING``), is busy with a script of
    others' (``BUSY``) or isn't the master (``READONLY``, ``MASTERDOWN``), and while it is full.
    redis-py's own retries are off, since they repeat commands without that number.
    """

    def __init__(self, client: redis.Redis, join: JoinInfo, name: str = "") -> None:
        self.redis = client
        self._brief: redis.Redis | None = None
        self._join = join
        self.run_id = join.run_id
        self.name = name
        self.peer = (join.host, join.port)
        self.address = f"{join.host}:{join.port}"
        self._prefix = f"tandem:{join.run_id}:"
        self._local = threading.local()
        self._callers = itertools.count()
        self._pid = os.getpid()
        self._incarnation = _new_incarnation()

    def __repr__(self) -> str:
        return f"Store(run_id={self.run_id!r}, address={self.address!r})"

    @property
    def incarnation(self) -> str:
        """Distinguishes this start of the process from earlier ones of the same member."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._incarnation = _new_incarnation()
            self._local = threading.local()
        return self._incarnation

    def key(self, name: str) -> str:
        """The full name of a key of this run."""
        return self._prefix + name

    # -- scripts ---------------------------------------------------------------------------

    def command(self, name: str, *args: Arg) -> Command:
        """One call of ``scripts/<name>.lua`` with its request number, for :meth:`batch`."""
        caller, request = self._next_request()
        return ("EVALSHA", script_digest(name), 1, self._prefix, caller, request, *args)

    def script(self, name: str, *args: Arg, deadline: float = DEADLINE) -> Any:
        """Runs ``scripts/<name>.lua`` and returns its answer.

        Raises:
            FencedError: a newer learner has taken over.
            StoreError: the script refused, or Redis was away or full for ``deadline`` seconds.
        """
        command = self.command(name, *args)
        client = self._client(deadline)
        return self.persist(f"{name} script", lambda: self._evaluate(client, command), deadline)

    def put(self, name: str, value: str, field: str = "", *, deadline: float = DEADLINE) -> None:
        """Sets a small value that a full Redis takes too: one of ``scripts/put.lua``, or a field of a hash of these."""
        self.script("put", name, value, field, deadline=deadline)

    def batch(self, commands: Sequence[Command], *, deadline: float = DEADLINE) -> list[Any]:
        """Sends commands in one round trip; the whole batch is repeated if it was cut off.

        If a command fails, the result holds its error instead of an answer (see :func:`readable_error`).
        """

        client = self._client(deadline)

        def send() -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute(raise_on_error=False))

        def attempt() -> list[Any]:
            results = send()
            if any(isinstance(r, NoScriptError) for r in results):
                self._load_scripts(client)
                results = send()
            results = [_as_full(r) if isinstance(r, ResponseError) else r for r in results]
            for result in results:
                if isinstance(result, ResponseError) and _disk_is_full(result):
                    raise result
            for result in results:
                if isinstance(result, BusyLoadingError | RedisConnectionError) or _is_away(result):
                    raise result
            return results

        if not commands:
            return []
        return self.persist(f"{len(commands)} commands", attempt, deadline)

    def answers(self, commands: Sequence[Command]) -> list[Any]:
        """:meth:`batch` of commands none of which may fail.

        Raises:
            StoreError: the first one's that did; or see :meth:`batch`.
        """
        results = self.batch(commands)
        for result in results:
            if isinstance(result, Exception):
                raise readable_error(result, self.address)
        return results

    def call(self, method: str, *args: Any, deadline: float = DEADLINE, **kwargs: Any) -> Any:
        """Runs one repeatable command of redis-py, by its method's name, with retries."""
        bound = getattr(self._client(deadline), method)
        return self.persist(method.upper(), lambda: bound(*args, **kwargs), deadline)

    def persist(self, what: str, operation: Callable[[], T], deadline: float = DEADLINE) -> T:
        """Runs ``operation`` until it is done or ``deadline`` seconds have passed."""
        wait = Wait(f"Redis at {self.address}", f"answer ({what})", deadline)
        # Callers report short waits themselves.
        warn = log.warning if deadline >= WARN_FROM else None
        pause, full = 0.005, 0.0
        while True:
            try:
                return operation()
            except (AuthenticationError, AuthorizationError) as error:
                raise self._refused(error) from None
            except (*_WAITS, ResponseError) as error:
                if not isinstance(error, _WAITS) and not _is_away(error):
                    if not _disk_is_full(error):
                        raise readable_error(error, self.address) from None
                    # This time counts towards no deadline: `tandem start` ends a run that waits for too long.
                    full += self._await_disk(what, error, full, deadline)
                    wait.restart()
                    continue
                wait.what = f"answer ({what}; {_cause(error)})"
                if wait.expired(warn):
                    if isinstance(error, OutOfMemoryError):
                        raise StoreError(
                            f"{wait}. Redis is full: raise replay.maxmemory_mb (of an existing Redis, its "
                            f"maxmemory), or let the learner catch up, whose checkpoints free memory"
                        ) from None
                    raise StoreError(
                        f"{wait}. Is the run's redis-server up? `tandem start` on the same run "
                        f"folder brings it back with all that it held"
                    ) from None
                time.sleep(min(pause, wait.pause))
                pause = min(2 * pause, LARGEST_PAUSE)
            except DataError as error:
                raise StoreError(f"{what}: Redis can't be sent this: {error}") from None

    def _await_disk(self, what: str, error: ResponseError, waited: float, deadline: float) -> float:
        """Waits a little for Redis to find space; returns for how long.

        Redis itself tries to write every second. Until it succeeds, it refuses whatever would change
        data, before anything has changed.
        """
        patience = disk.patience() if deadline >= DEADLINE else deadline
        why = str(error).partition("MISCONF ")[2]
        problem = f"Redis at {self.address} can't write its append-only file ({why})"
        if not waited and deadline >= WARN_FROM:
            log.warning(f"{problem}: {what} waits for space on its disk, {patience:.0f} s at most")
        if waited >= patience or disk.stopping():
            raise StoreError(
                f"{problem}, {what} has waited for {waited:.0f} s: make room on the disk of the run's "
                f"folder, where redis/ is what grows"
            )
        pause = min(LARGEST_PAUSE, max(0.01, patience - waited))
        time.sleep(pause)
        return pause

    def hints(self, *channels: str) -> Hints:
        """Subscribes to hints (``taken``, ``graded``, ``version``, ``state``)."""
        return Hints(self, channels)

    def holds_run(self) -> bool:
        """Whether this server holds the run's ledger."""
        return bool(self.call("hexists", self.key("meta"), "created"))

    def close(self) -> None:
        """Closes the pools' connections."""
        self.redis.close()
        if self._brief is not None:
            self._brief.close()

    def _client(self, deadline: float) -> redis.Redis:
        """The client for a command. Of a server that hangs, one that may take long would wait past a short deadline."""
        if deadline > BRIEF_TIMEOUT:
            return self.redis
        if self._brief is None:
            self._brief = make_client(self._join, timeout=BRIEF_TIMEOUT, name=self.name)
        return self._brief

    def _next_request(self) -> tuple[str, int]:
        incarnation = self.incarnation
        local = self._local
        if not hasattr(local, "caller"):
            local.caller = f"{incarnation}.{next(self._callers)}"
            local.requests = itertools.count(1)
        return local.caller, next(local.requests)

    def _evaluate(self, client: redis.Redis, command: Command) -> Any:
        try:
            try:
                return client.execute_command(*command)
            except NoScriptError:
                self._load_scripts(client)
                return client.execute_command(*command)
        except ResponseError as error:
            raise _as_full(error) from None

    def _load_scripts(self, client: redis.Redis) -> None:
        """Loads every script, after informing the ledger if the server was restarted.

        A restarted server knows no scripts, so whoever calls it first comes through here, and deadlines
        are moved on before any script can judge one. Everything is sent on one connection, hence to one
        start of the server.
        """
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command(
            "EVAL", script_source("server_started"), 1, self._prefix, "loader", 0
        )
        for name in script_names():
            # Without keys, a script does nothing except become known (see the prelude).
            pipeline.execute_command("EVAL", script_source(name), 0)
        pipeline.execute()

    def _refused(self, error: Exception) -> StoreError:
        return StoreError(
            f"Redis at {self.address} refused the password ({_cause(error)}): the join file is "
            f"of another run or out of date; copy it again with `tandem join-file`"
        )


class Hints:
    """Wakes a waiter when something may have changed. A lost hint is harmless, since callers look
    again every 0.25 s. For one thread."""

    def __init__(self, store: Store, channels: Sequence[str]) -> None:
        self._store = store
        self._names = {store.key(f"hint:{c}").encode(): c for c in channels}
        self._pubsub: Any = None
        self._pending: dict[str, None] = {}

    def wait(self, timeout: float) -> str | None:
        """The next channel with a hint, several hints counting as one; None after ``timeout`` seconds
        without any."""
        if not self._pending:
            try:
                self._read(timeout)
            except (RedisError, OSError, ValueError) as error:
                log.debug(f"hints are cut off: {_cause(error)}")
                self.close()
                time.sleep(min(timeout, 0.05))
        if not self._pending:
            return None
        channel = next(iter(self._pending))
        del self._pending[channel]
        return channel

    def _read(self, timeout: float) -> None:
        if self._pubsub is None:
            self._pubsub = self._store.redis.pubsub(ignore_subscribe_messages=True)
            self._pubsub.subscribe(*self._names)
        end = time.monotonic() + timeout
        left = timeout
        while True:
            message = self._pubsub.get_message(timeout=max(0.0, left))
            if message is not None and message["type"] == "message":
                self._pending[self._names[message["channel"]]] = None
            # A hint has come: take whatever else is there without waiting for more.
            left = 0.0 if self._pending else end - time.monotonic()
            if message is None and left <= 0.0:
                return

    def close(self) -> None:
        """Ends the subscription."""
        if self._pubsub is not None:
            try:
                self._pubsub.close()
            except (RedisError, OSError) as error:
                log.debug(f"closing hints: {_cause(error)}")
            self._pubsub = None


def readable_error(error: Exception, address: str = "Redis") -> Exception:
    """The error to show a person for an error reply of Redis."""
    text = str(error)
    word, _, rest = text.partition(" ")
    if word == "FENCED":
        return FencedError(rest)
    if word == "REFUSED":
        return RefusedError(rest)
    in_script = "can't run this command" in text or "ACL failure" in text
    if in_script or isinstance(error, NoPermissionError):
        return StoreError(
            f"Redis at {address} doesn't permit a command to this user ({text}): docs/redis.md has the "
            f"ACL rule that a run needs"
        )
    if isinstance(error, OutOfMemoryError):
        return FullError(
            f"Redis at {address} is full ({text}): raise replay.maxmemory_mb (of an existing Redis, its maxmemory)"
        )
    return StoreError(f"Redis at {address} answered with an error: {text}")


def _as_full(error: ResponseError) -> ResponseError:
    """Unwraps the error in which Redis 6.2 hides a script's -OOM, its first write on a full server."""
    return OutOfMemoryError(str(error)) if ": -OOM " in str(error) else error


def _disk_is_full(error: Exception) -> bool:
    """Whether Redis refuses writes because it can't keep its own."""
    return _says(error, "MISCONF")


def _is_away(answer: object) -> bool:
    """Whether an answer says that Redis takes no commands, or no writes, for a while: another client's script keeps
    it busy, or a hosted server fails over."""
    return isinstance(answer, ReadOnlyError | MasterDownError) or (
        isinstance(answer, ResponseError) and _says(answer, "BUSY", "READONLY", "MASTERDOWN")
    )


def _says(error: Exception, *words: str) -> bool:
    """Whether an error begins with one of these words; a script's or a pipeline's error may wrap this."""
    text = str(error)
    return not text.startswith("REFUSED ") and any(
        text.startswith(f"{word} ") or f": -{word} " in text or f": {word} " in text
        for word in words
    )


def connect(join: JoinInfo, *, deadline: float = 30.0, name: str = "") -> Store:
    """Connects to the run's Redis, waiting up to ``deadline`` seconds for it to come up.

    Raises:
        StoreError: it never came up, refused the password or the certificate, or its own certificate
            can't be trusted (raised at once); it is older than 6.2, or would evict keys when full.
    """
    client = make_client(join, timeout=SOCKET_TIMEOUT, name=name)
    store = Store(client, join, name)

    def first_contact() -> dict[str, Any]:
        pipeline = client.pipeline(transaction=False)
        pipeline.info("server")
        pipeline.info("memory")
        try:
            server, memory = pipeline.execute()
        except RedisConnectionError as error:
            if why := refusal(error, join):
                raise StoreError(why) from None
            raise
        return {**server, **memory}

    _check_server(store.persist("first contact", first_contact, deadline), store.address)
    return store


def _check_server(info: dict[str, Any], address: str) -> None:
    version = str(info.get("redis_version", "0.0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_REDIS:
        raise StoreError(f"Redis at {address} is version {version}: 6.2 or newer is needed")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreError(
            f"Redis at {address} has maxmemory-policy={policy}, which throws keys away when it "
            f"is full: set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
        )


def _new_incarnation() -> str:
    return f"{os.getpid():x}.{secrets.token_hex(4)}"


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
