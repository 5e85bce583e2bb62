"""A join file that is made before the run: the run takes its id, its password and its port from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.common.config import LaunchConfig, to_yaml
from tandem.common.errors import ConfigError
from tandem.common.run_folder import JoinInfo, RunFolder, read_join
from tandem.launch.cli import dispatch
from tandem.launch.cluster.join import new_join, text_of
from tandem.launch.host import redis_server
from tandem.launch.run.joining import HeadUnreachable
from tandem.launch.run.opened.opening import open_folder
from tandem.launch.run.opened.presets import load
from tandem.launch.run.opened.record import RunRecord
from tandem.launch.run.processes.redis_part import where


def made(path: Path, port: int) -> JoinInfo:
    preset = load("miniature")
    config = preset.resolve([f"launch.ports={port}-{port + 31}"])
    path.write_text(text_of(new_join(config, "head.example")))
    return read_join(path)


def joined(tmp_path: Path, *words: str) -> JoinInfo:
    opening = open_folder(load("miniature"), [f"run.dir={tmp_path}/run", *words], fresh=False)
    return where(opening, RunRecord(opening, 0.0), lambda line: None)[0]


def test_a_new_run_takes_id_password_and_port_from_it_and_its_own_address(tmp_path: Path):
    port = redis_server.choose_port("127.0.0.1", None)
    given = made(tmp_path / "given.json", port)
    assert given.host == "head.example"
    found = joined(tmp_path, f"launch.join={tmp_path}/given.json")
    assert (found.run_id, found.password, found.port) == (given.run_id, given.password, port)
    assert found.host == LaunchConfig().bind


def test_a_port_that_the_range_does_not_begin_with_is_refused(tmp_path: Path):
    port = redis_server.choose_port("127.0.0.1", None)
    made(tmp_path / "given.json", port)
    other = redis_server.choose_port("127.0.0.1", None)
    words = [f"launch.join={tmp_path}/given.json", f"launch.ports={other}-{other + 31}"]
    with pytest.raises(ConfigError, match=f"Redis is to listen on port {port}, as launch.join="):
        joined(tmp_path, *words)


def test_the_file_of_another_run_is_refused(tmp_path: Path):
    given = made(tmp_path / "given.json", redis_server.choose_port("127.0.0.1", None))
    opening = open_folder(
        load("miniature"),
        [f"run.dir={tmp_path}/run", f"launch.join={tmp_path}/given.json"],
        fresh=False,
    )
    made(tmp_path / "given.json", given.port)
    with pytest.raises(ConfigError, match=f"is of run .* holds run {given.run_id}"):
        where(opening, RunRecord(opening, 0.0), lambda line: None)


def test_it_says_how_an_existing_redis_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TANDEM_REDIS_PASSWORD", "secret")
    preset = load("miniature")
    url = "replay.redis_url=rediss://me@redis.example:6380/2"
    config = preset.resolve([url, "replay.redis_ca=/tls/ca.pem", "replay.redis_cert=/tls/both.pem"])
    join = new_join(config, "head.example")
    assert (join.host, join.port, join.db) == ("redis.example", 6380, 2)
    assert (join.username, join.password, join.tls) == ("me", "secret", True)
    assert (join.ca, join.cert, join.key) == ("/tls/ca.pem", "/tls/both.pem", None)


@pytest.mark.parametrize(("host", "refused"), [("redis.example", True), ("127.0.0.1", False)])
def test_a_copy_for_another_host_keeps_the_address_of_an_existing_redis(
    tmp_path: Path, host: str, refused: bool
):
    config = load("miniature").resolve([f"replay.redis_url=redis://{host}:6380"])
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.write_run({"run_id": "0123456789ab"})
    folder.config.write_text(to_yaml(config))
    folder.write_join(new_join(config, "head.example"))
    copy = tmp_path / "join.json"
    words = ["join-file", "--run", str(folder.path), str(copy)]
    assert dispatch(words) == 0
    assert read_join(copy).host == host
    if refused:
        with pytest.raises(ConfigError, match=r"redis\.example:6380: leave --host out"):
            dispatch([*words, "--host", "10.1.2.3"])
    else:
        # Of a server on the head itself only the head has that address.
        assert dispatch([*words, "--host", "10.1.2.3"]) == 0
        assert read_join(copy).host == "10.1.2.3"


def test_made_again_it_keeps_the_id_of_the_run_and_a_password_for_its_own_server_alone():
    def again(url: str | None, kept: JoinInfo) -> JoinInfo:
        words = [] if url is None else [f"replay.redis_url={url}"]
        return new_join(load("miniature").resolve(words), "head.example", kept)

    own = again(None, JoinInfo(run_id="0123456789ab", host="old.example", port=1))
    assert own.password
    assert again(None, own) == own
    elsewhere = again("redis://me@redis.example:6380/2", own)
    assert (elsewhere.run_id, elsewhere.host) == (own.run_id, "redis.example")
    assert elsewhere.password is None
    # The variable that had it isn't set the second time.
    given = again("redis://me:marker@redis.example:6380", elsewhere)
    assert again("redis://me@redis.example:6380", given) == given
    assert again("redis://me@other.example:6380", given).password is None


def test_a_host_that_joins_waits_for_the_head_for_as_long_as_it_is_told(tmp_path: Path):
    made(tmp_path / "join.json", redis_server.choose_port("127.0.0.1", None))
    words = ["join-file", "--from", str(tmp_path / "join.json"), "--host", "127.0.0.1"]
    assert dispatch([*words, str(tmp_path / "here.json")]) == 0
    with pytest.raises(HeadUnreachable, match=r"\b0\.5 s"):
        dispatch(["join", str(tmp_path / "here.json"), "--wait", "0.5"])
    with pytest.raises(ConfigError, match="--wait inf"):
        dispatch(["join", str(tmp_path / "here.json"), "--wait", "inf"])
