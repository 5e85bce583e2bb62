"""``launch.ports``: everything that listens stays within the range, and a taken port is named."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import zmq

from tandem.common.config import build
from tandem.common.errors import ConfigError
from tandem.common.sockets import bind_free, bind_router, to_try
from tandem.common.weights.gloo import meeting_point
from tandem.launch.host import redis_server
from tandem.launch.host.preflight import check_ports, ports_wanted

HOST = "127.0.0.1"


@pytest.fixture
def ports() -> range:
    """Four ports that were free just now; other tests of the machine have others."""
    first = 20_000 + os.getpid() % 1_000 * 8
    while any(not _is_free(port) for port in range(first, first + 4)):
        first += 8
    return range(first, first + 4)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0


@pytest.fixture
def held() -> Iterator[list[socket.socket]]:
    """Listeners, which are closed in the end."""
    found: list[socket.socket] = []
    yield found
    for one in found:
        one.close()


def listen(held: list[socket.socket], port: int) -> None:
    one = socket.create_server((HOST, port))
    held.append(one)


def test_all_but_the_first_port_are_tried_which_is_redis_own(ports: range):
    assert sorted(to_try(ports)) == list(ports[1:])
    assert to_try(None) == (0,)


def test_sockets_take_the_ports_that_are_left_and_then_name_the_range(
    ports: range, held: list[socket.socket]
):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        listen(held, ports[2])
        router, endpoint = bind_router(context, HOST, None, ports)
        point = meeting_point(HOST, ports)
        taken = {int(endpoint.rpartition(":")[2]), point.port}
        assert taken == {ports[1], ports[3]}
        with socket.socket() as third, pytest.raises(ConfigError, match=f"{ports[0]}-{ports[-1]}"):
            bind_free(third, HOST, ports)
        with pytest.raises(ConfigError, match=r"widen launch\.ports"):
            bind_router(context, HOST, None, ports)
        router.close(0)
    finally:
        context.destroy(linger=0)


def test_redis_has_the_first_port_and_whoever_holds_it_is_named(
    ports: range, held: list[socket.socket]
):
    assert redis_server.redis_port(HOST, 4711, ports) == ports[0]
    listen(held, ports[0])
    with pytest.raises(ConfigError, match=f"port {ports[0]} .* taken by process {os.getpid()} "):
        redis_server.redis_port(HOST, None, ports)


def test_a_range_with_too_few_free_ports_is_refused_before_the_start(
    ports: range, held: list[socket.socket]
):
    config = build(
        {
            "model": {"path": "miniature"},
            "run": {"steps": 1},
            "data": {"train": [{"path": "x.parquet"}]},
            "rollout": {"workers": 1},
            "reward": {"pools": 0},
            "launch": {"ports": f"{ports[0]}-{ports[-1]}"},
        }
    )
    assert ports_wanted(config) == 3
    check_ports(config, ports)
    for port in ports[1:3]:
        listen(held, port)
    with pytest.raises(
        ConfigError, match=f"has 2 free ports .*{ports[1]} by process {os.getpid()}"
    ):
        check_ports(config, ports)


@pytest.mark.parametrize(
    "text", ["29500", "29599-29500", "80-90", "1024-70000", "a-b", "2000-2000"]
)
def test_a_range_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError, match="FIRST-LAST"):
        build({"launch": {"ports": text}, "model": {"path": "m"}, "data": {"train": []}})
