"""`tandem join --dry-run`: what each role would start, asked of a real Redis that holds the run."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tandem.common.config import to_yaml
from tandem.common.run_folder import RunFolder, read_join
from tandem.launch import cli
from tandem.launch.host import surroundings
from tandem.launch.plan.hardware import Gpu
from tandem.launch.run import joining
from tandem.launch.run.opened.presets import load
from tandem.replay.connection import Store, connect
from tandem.replay.hosts import HEAD, HostLink, HostState
from tandem.replay.store import RunStore

ROLES = {
    "rollout": (["--workers", "2"], 2, "tandem.launch.lifeline"),
    "reward": ([], 1, "reward"),
    "environments": ([], 1, "environments"),
    "learner": ([], 2, "--master-address ADDRESS --master-port PORT"),
}
SETTINGS = [
    "learner.ranks=4",
    "learner.hosts=2",
    'environments.use={even: {form: text, target: "even_world:Even"}}',
    "environments.default=even",
    "expert.per_group=0",
]


@pytest.fixture
def run(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.chdir(tmp_path)
    join = server.join()
    RunFolder(tmp_path).write_join(join)
    store = connect(join)
    yield store
    store.close()


def put(store: Store, *overrides: str) -> None:
    RunStore(store).put_config(to_yaml(load("miniature").resolve(list(overrides))))
    store.call("hset", store.key("meta"), "created", "1")


@pytest.mark.parametrize("role", ROLES)
def test_it_names_every_process_and_tells_the_run_nothing(
    role: str, run: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run, *SETTINGS)
    before = {key: run.redis.dump(key) for key in run.redis.keys("*")}
    words, count, part = ROLES[role]
    assert (
        cli.main(["join", "join.json", "--role", role, "--dry-run", "--name", "two", *words]) == 0
    )
    out = capsys.readouterr().out
    assert "nothing is started" in out
    assert len([line for line in out.splitlines() if line.startswith(f"  {role}-")]) == count
    assert part in out
    assert f"{role} --join {Path('join.json').absolute()}" in out
    assert {key: run.redis.dump(key) for key in run.redis.keys("*")} == before
    assert not Path("hosts").exists()


def test_with_an_existing_redis_the_address_is_the_one_that_the_head_reaches(
    run: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["join", "join.json", "--role", "reward", "--dry-run"]
    put(run, "launch.bind=nowhere.invalid")
    assert cli.main(words) == 0
    assert "address: 127.0.0.1, from which the head" in capsys.readouterr().out
    put(run, "launch.bind=nowhere.invalid", f"replay.redis_url=redis://{run.address}")
    assert cli.main(words) == 2
    assert "no address of this host reaches nowhere.invalid" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["rollout", "reward", "environments"])
def test_the_time_to_drain_reaches_the_processes(
    role: str, run: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run, *SETTINGS)
    words = ["join", "join.json", "--role", role, "--dry-run"]
    assert cli.main([*words, "--drain", "20"]) == 0
    assert "drain: at most 20 s" in (out := capsys.readouterr().out)
    assert " --drain 20\n" in out
    assert "warning" not in out
    assert cli.main(words) == 0
    assert "--drain" not in capsys.readouterr().out
    # A head that stops has the run's time alone, and Redis ends with it.
    assert cli.main([*words, "--drain", "600"]) == 0
    assert "drain: at most 60 s" in (out := capsys.readouterr().out)
    assert " --drain 60\n" in out
    assert "warning: --drain 600 is over the run's launch.drain_seconds=60" in out
    assert cli.main([*words, "--drain", "inf"]) == 2
    assert "--drain inf should be over 0 seconds, and finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("role", "why"),
    [
        ("learner", "learner.hosts=1"),
        ("environments", "environments.use is empty"),
    ],
)
def test_a_role_that_the_run_has_no_use_for_is_refused(
    role: str, why: str, run: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run)
    assert cli.main(["join", "join.json", "--role", role, "--dry-run"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_a_run_that_binds_all_addresses_can_not_be_joined(
    role: str, run: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run, "launch.bind=0.0.0.0")
    assert cli.main(["join", "join.json", "--role", role, "--dry-run"]) == 2
    assert "launch.bind set to one private address of the head" in capsys.readouterr().err


@pytest.fixture
def facing_network(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's Redis has another name than one of loopback, as an existing one elsewhere has."""
    address = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **named: address("127.0.0.1", *more, **named)
    )
    join = structs.replace(read_join(Path("join.json")), host="redis.example")
    RunFolder(Path.cwd()).write_join(join)


def head_of(run: Store, network: str) -> HostLink:
    state = HostState(
        host="head", address="127.0.0.1", pid=1, role=HEAD, processes=3, network=network
    )
    return HostLink(run, "head-1", state)


@pytest.mark.usefixtures("facing_network")
@pytest.mark.parametrize(
    ("network", "here", "bind", "code"),
    [
        ("elsewhere/net:[7]", "here/net:[7]", "127.0.0.1", 2),
        ("elsewhere/net:[7]", "here/net:[7]", "10.0.0.1", 0),
        ("here/net:[7]", "here/net:[7]", "127.0.0.1", 0),
        # The system of one of them doesn't tell.
        ("", "here/net:[7]", "127.0.0.1", 0),
        ("elsewhere/net:[7]", "", "127.0.0.1", 0),
    ],
)
def test_a_run_that_binds_loopback_is_joined_on_its_own_host_alone(
    network: str,
    here: str,
    bind: str,
    code: int,
    run: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(joining, "network_name", lambda: here)
    put(run, f"launch.bind={bind}", f"replay.redis_url=redis://{run.address}")
    link = head_of(run, network)
    link.start()
    try:
        while link.look is None:
            time.sleep(0.02)
        assert cli.main(["join", "join.json", "--role", "reward", "--dry-run"]) == code
    finally:
        link.stop(leave=True)
    assert ("launch.bind=127.0.0.1, at which only its head, head," in capsys.readouterr().err) == (
        code == 2
    )


@pytest.mark.usefixtures("facing_network")
def test_a_head_that_comes_later_is_looked_at_as_well(
    run: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run, f"replay.redis_url=redis://{run.address}")
    link = head_of(run, "elsewhere/net:[7]")

    def come() -> None:
        while not Path("hosts").exists():
            time.sleep(0.02)
        link.start()

    comes = threading.Thread(target=come)
    comes.start()
    try:
        assert cli.main(["join", "join.json", "--role", "reward"]) == 2
    finally:
        comes.join()
        link.stop(leave=True)
    assert "at which only its head" in capsys.readouterr().err


def test_a_host_with_gpus_and_a_torch_for_cpus_is_refused(
    run: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(run, "launch.gpus=auto")
    # The name by which a GPU is held is the host's: no other test's, nor anybody else's.
    one = (Gpu(index=0, name="H100", memory_mb=81559, uuid=f"GPU-{os.getpid()}"),)
    monkeypatch.setattr("tandem.launch.plan.hardware.gpus", lambda: one)
    monkeypatch.setattr(surroundings, "cuda_of_torch", lambda: None)
    assert cli.main(["join", "join.json", "--role", "rollout"]) == 2
    assert "built for CPUs alone" in capsys.readouterr().err
    assert not Path("hosts").exists()


def test_a_redis_that_goes_away_before_it_holds_the_run_may_be_tried_again(
    own_server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder(tmp_path).write_join(own_server.join())
    # A minute otherwise.
    monkeypatch.setitem(Store.call.__kwdefaults__, "deadline", 0.5)

    def kill() -> None:
        client = own_server.client()
        while "cmdstat_hexists" not in client.info("commandstats"):
            time.sleep(0.02)
        client.close()
        own_server.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    assert cli.main(["join", "join.json", "--role", "rollout"]) == 75
    killer.join()
    assert "Is the run's redis-server up?" in capsys.readouterr().err
