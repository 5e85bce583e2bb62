"""The run's own redis-server: found, started, started again in its place, refused a wrong password."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from tandem.common.config import ReplayConfig
from tandem.common.errors import ConfigError, StoreError, TandemError
from tandem.common.run_folder import JoinInfo, RunFolder
from tandem.launch.host import redis_server
from tandem.launch.run.running import has_finished
from tandem.replay.connection import connect
from tandem.replay.store import RunStore


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / 'a "run" of\\mine')
    made.make()
    return made


def start(folder: RunFolder, join: JoinInfo, **replay: object) -> subprocess.Popen[bytes]:
    config = ReplayConfig(**replay)  # type: ignore[arg-type]
    conf = redis_server.write_conf(folder, join, config, "127.0.0.1")
    log = open(folder.logs / "redis.log", "ab")  # noqa: SIM115
    return subprocess.Popen(
        [str(redis_server.find().path), str(conf)], stdout=log, stderr=log, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def join() -> JoinInfo:
    port = redis_server.choose_port("127.0.0.1", None)
    return JoinInfo(run_id="r", host="127.0.0.1", port=port, password=redis_server.new_password())


@pytest.fixture
def server(folder: RunFolder, join: JoinInfo) -> Iterator[subprocess.Popen[bytes]]:
    process = start(folder, join)
    redis_server.wait_ready(join, deadline=20, alive=lambda: process.poll() is None)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


def test_what_it_is_given_as_settings(folder: RunFolder, join: JoinInfo, server) -> None:
    client = redis_server.client(join)
    settings = client.config_get("*")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "no"
    assert settings["save"] == ""
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["maxmemory"] == str(2048 << 20)
    assert settings["dir"] == str(folder.redis)
    client.close()


def test_it_listens_on_loopback_only(server) -> None:
    listening = [c for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"]
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}


def test_the_password_is_private(folder: RunFolder, join: JoinInfo, server) -> None:
    conf = folder.redis / "redis.conf"
    assert stat.S_IMODE(os.stat(conf).st_mode) == 0o600
    assert join.password is not None
    assert join.password not in " ".join(psutil.Process(server.pid).cmdline())
    assert join.password not in (folder.logs / "redis.log").read_text()


def test_a_killed_server_comes_back_on_its_port_with_its_data(
    folder: RunFolder, join: JoinInfo, server
) -> None:
    client = redis_server.client(join)
    client.set("a", "1")
    client.close()
    server.kill()
    server.wait()
    assert redis_server.choose_port("127.0.0.1", join.port) == join.port
    again = start(folder, join)
    try:
        redis_server.wait_ready(join, deadline=20, alive=lambda: again.poll() is None)
        client = redis_server.client(join)
        assert client.get("a") == b"1"
        client.close()
    finally:
        again.terminate()
        again.wait(20)


def aof_of(folder: RunFolder) -> Path:
    """The file that commands are appended to."""
    (path,) = [*folder.redis.glob("appendonly.aof"), *folder.redis.rglob("*.incr.aof")]
    return path


@pytest.mark.parametrize("zeros", [1, 7, 4096, 3 << 20])
@pytest.mark.parametrize("torn", [0, 3, 30])
def test_zeros_behind_the_last_command_are_taken_off(
    folder: RunFolder, join: JoinInfo, server, zeros: int, torn: int
) -> None:
    """A power loss leaves a file with its last command cut and zeros up to its length."""
    client = redis_server.client(join)
    client.set("a", b"\0" * 20)
    client.set("b", b"x" * 40)
    client.close()
    server.kill()
    server.wait()
    assert redis_server.mend(folder) == ""
    path = aof_of(folder)
    whole = path.read_bytes()
    kept = whole[: len(whole) - torn]
    path.write_bytes(kept + b"\0" * zeros)
    told = redis_server.mend(folder)
    assert f"{path} ended in {zeros:,} zero bytes" in told
    assert path.read_bytes() == kept
    again = start(folder, join)
    try:
        redis_server.wait_ready(join, deadline=20, alive=lambda: again.poll() is None)
        client = redis_server.client(join)
        assert client.get("a") == b"\0" * 20
        assert client.get("b") == (None if torn else b"x" * 40)
        client.close()
    finally:
        again.terminate()
        again.wait(20)


def test_a_snapshot_at_the_beginning_of_the_file_keeps_its_checksum(folder: RunFolder) -> None:
    path = folder.redis / "appendonly.aof"
    for end, zeros in ((b"\xff" + b"\0" * 8, 0), (b"*1\r\n$4\r\nPING\r\n" + b"\0" * 5, 5)):
        path.write_bytes(b"REDIS0009" + end)
        assert bool(redis_server.mend(folder)) == bool(zeros)
        assert path.read_bytes() == b"REDIS0009" + end[: len(end) - zeros]


def test_a_file_that_the_server_cannot_read_is_told_from_its_log(
    folder: RunFolder, join: JoinInfo, server
) -> None:
    client = redis_server.client(join)
    for number in range(9):
        client.set(f"k{number}", "x" * 40)
    client.close()
    server.kill()
    server.wait()
    path = aof_of(folder)
    log = folder.logs / "redis.log"
    assert not redis_server.says_damaged(log.read_text())
    path.write_bytes(
        path.read_bytes().replace(b"*3\r\n$3\r\nSET\r\n$2\r\nk4", b"+3\r\n$3\r\nSET\r\n$2\r\nk4")
    )
    again = start(folder, join)
    assert again.wait(20) != 0
    assert redis_server.says_damaged(log.read_text())


def test_a_port_that_is_taken_is_replaced(join: JoinInfo, server) -> None:
    assert redis_server.choose_port("127.0.0.1", join.port) != join.port


@pytest.mark.parametrize("password", ["wrong", None])
def test_a_wrong_password_is_refused_at_once(join: JoinInfo, server, password) -> None:
    other = structs.replace(join, password=password)
    with pytest.raises(StoreError, match=f"Redis at 127.0.0.1:{join.port} refused") as told:
        redis_server.wait_ready(other, deadline=20)
    assert "TANDEM_REDIS_PASSWORD" in str(told.value)
    assert str(join.password) not in str(told.value)


def test_a_server_that_never_answers_is_told(join: JoinInfo) -> None:
    with pytest.raises(StoreError, match="nothing answers there"):
        redis_server.wait_ready(join, deadline=0.1)


def test_a_server_that_ended_is_not_waited_for(join: JoinInfo) -> None:
    with pytest.raises(StoreError, match="ended before it answered"):
        redis_server.wait_ready(join, deadline=20, alive=lambda: False)


def test_power_durability_syncs_every_write(folder: RunFolder, join: JoinInfo) -> None:
    conf = redis_server.write_conf(
        folder, join, ReplayConfig(durability="power"), "127.0.0.1"
    ).read_text()
    assert "appendfsync always\n" in conf


def test_a_url_is_read_and_shown_without_its_password(monkeypatch) -> None:
    monkeypatch.delenv(redis_server.PASSWORD_VARIABLE, raising=False)
    join, shown = redis_server.parse_url("redis://me:pa%20ss@db.local:7000/3", "r", None)
    assert (join.host, join.port, join.db, join.username) == ("db.local", 7000, 3, "me")
    assert join.password == "pa ss"
    assert shown == "redis://me@db.local:7000/3"
    monkeypatch.setenv(redis_server.PASSWORD_VARIABLE, "from env")
    assert redis_server.parse_url("redis://h", "r", None)[0].password == "from env"
    assert redis_server.parse_url("rediss://h:1/0", "r", None)[0].tls


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://h:1", "redis://h:port", "redis://h/x", "redis://h/-1"]
)
def test_what_is_no_redis_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://HOST:PORT/DB"):
        redis_server.parse_url(url, "r", None)


def test_settings_at_the_end_of_a_url_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"isn't read: TLS has the settings replay\.redis_ca"):
        redis_server.parse_url("rediss://h:1/0?ssl_cert_reqs=none", "r", None)


def test_a_bind_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"launch\.bind=192\.0\.2\.1"):
        redis_server.choose_port("192.0.2.1", None)


def test_no_server_program_says_how_to_get_one(monkeypatch, tmp_path: Path) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=0'\n")
    old.chmod(0o755)
    monkeypatch.setattr(redis_server, "_candidates", lambda: [old, tmp_path / "none"])
    with pytest.raises(TandemError, match=r"is 5\.0\.7; .* doesn't run.*apt install redis-server"):
        redis_server.find()


@pytest.mark.timeout(20)
def test_the_supervisor_does_not_wait_for_a_dead_server_to_say_if_the_run_has_finished(
    own_server: Any,
) -> None:
    store = connect(own_server.join())
    RunStore(store).set_state("finished")
    assert has_finished(store)
    own_server.kill()
    # It is the supervisor who would start the server again: waiting for it, it would wait a minute.
    assert has_finished(store) is None
    store.close()
