"""ZeroMQ sockets: loopback by default, keys beyond it, and only the run's client is let in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.common import sockets
from tandem.common.errors import ConfigError, WireError
from tandem.common.sockets import (
    Authenticator,
    CurveKeys,
    bind_router,
    connect_dealer,
    interface_of,
    is_loopback,
    new_keys,
    own_address,
)

Context = zmq.Context


@pytest.fixture
def contexts() -> Iterator[tuple[Context, Context]]:
    """A server's and a client's."""
    pair = (zmq.Context(), zmq.Context())
    yield pair
    for context in pair:
        context.destroy(linger=0)


def asks(
    contexts: tuple[Context, Context],
    client: CurveKeys | None,
    wait_ms: int,
    *,
    server_key: str = "",
) -> bool:
    """Whether a message of a client with these keys reaches a server that lets one key in."""
    server_context, client_context = contexts
    keys, allowed = new_keys(), ALLOWED
    guard = Authenticator(server_context, allowed.public)
    router, endpoint = bind_router(server_context, "127.0.0.1", keys)
    dealer = connect_dealer(
        client_context,
        endpoint,
        identity="c",
        server_public=server_key or keys.public,
        client=client,
    )
    try:
        dealer.setsockopt(zmq.SNDTIMEO, wait_ms)
        try:
            dealer.send(b"hello")
        except zmq.Again:
            return False
        return bool(router.poll(wait_ms)) and router.recv_multipart() == [b"c", b"hello"]
    finally:
        router.close(0)
        dealer.close(0)
        guard.stop()


ALLOWED = new_keys()


def test_the_holder_of_the_client_key_is_let_in(contexts: tuple[Context, Context]):
    assert asks(contexts, ALLOWED, 10_000)


def test_a_client_with_a_key_of_its_own_is_not_let_in(contexts: tuple[Context, Context]):
    assert not asks(contexts, new_keys(), 300)


def test_a_client_without_keys_is_not_let_in(contexts: tuple[Context, Context]):
    assert not asks(contexts, None, 300)


def test_a_client_does_not_talk_to_a_server_of_another_key(contexts: tuple[Context, Context]):
    assert not asks(contexts, ALLOWED, 300, server_key=new_keys().public)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "worker-7"])
def test_beyond_loopback_nothing_is_bound_without_keys(
    contexts: tuple[Context, Context], host: str
):
    with pytest.raises(ConfigError, match=f"refused to bind {host} without CURVE keys"):
        bind_router(contexts[0], host, None)


def test_loopback_is_bound_without_keys_on_an_ephemeral_port(contexts: tuple[Context, Context]):
    one, first = bind_router(contexts[0], "127.0.0.1", None)
    two, second = bind_router(contexts[0], "127.0.0.1", None)
    assert first != second
    dealer = connect_dealer(contexts[1], first, identity="c", server_public=None, client=None)
    dealer.setsockopt(zmq.SNDTIMEO, 10_000)
    dealer.send(b"hello")
    assert one.poll(10_000)
    assert one.recv_multipart() == [b"c", b"hello"]
    for socket in (one, two, dealer):
        socket.close(0)


def test_nothing_is_queued_for_a_server_that_is_not_there(contexts: tuple[Context, Context]):
    dealer = connect_dealer(
        contexts[1], "tcp://127.0.0.1:1", identity="c", server_public=None, client=None
    )
    with pytest.raises(zmq.Again):
        dealer.send(b"hello", zmq.DONTWAIT)
    dealer.close(0)


def test_a_client_that_comes_back_under_its_name_is_heard(contexts: tuple[Context, Context]):
    router, endpoint = bind_router(contexts[0], "127.0.0.1", None)
    for text in (b"first life", b"second life"):
        dealer = connect_dealer(
            contexts[1], endpoint, identity="rollout-0", server_public=None, client=None
        )
        dealer.setsockopt(zmq.SNDTIMEO, 10_000)
        dealer.send(text)
        assert router.poll(10_000)
        assert router.recv_multipart() == [b"rollout-0", text]
        # The server answers the newest life, without the old one having said good-bye.
        router.send_multipart([b"rollout-0", text])
        assert dealer.poll(10_000)
        assert dealer.recv() == text
    contexts[1].destroy(linger=0)
    router.close(0)


def test_a_peer_that_falls_silent_is_disconnected(
    contexts: tuple[Context, Context], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 100)
    code = (
        "import sys, zmq; from tandem.common.sockets import bind_router\n"
        "context = zmq.Context(); router, endpoint = bind_router(context, '127.0.0.1', None)\n"
        "print(endpoint, flush=True); sys.stdin.read()"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        dealer = connect_dealer(
            contexts[1], endpoint, identity="c", server_public=None, client=None, connect=False
        )
        events = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        dealer.connect(endpoint)
        assert events.poll(10_000)
        assert recv_monitor_message(events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        # As when its host loses the network: the connection stays, and nothing comes any more.
        os.kill(server.pid, signal.SIGSTOP)
        assert events.poll(10_000)
        assert recv_monitor_message(events)["event"] == zmq.EVENT_DISCONNECTED
        events.close(0)
        dealer.close(0)
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("192.168.1.1", False),
        ("example.org", False),
    ],
)
def test_loopback_is_known(host: str, answer: bool):
    assert is_loopback(host) is answer


def test_the_secret_key_is_not_shown():
    keys = new_keys()
    assert keys.secret not in repr(keys)
    assert len(keys.public) == len(keys.secret) == 40


@pytest.mark.parametrize(
    ("endpoint", "key", "right"),
    [
        ("tcp://learner-0.cluster:5555", "", True),
        ("tcp://[::1]:5555", "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", True),
        ("tcp://.1:1", "", False),
        ("tcp://-a:1", "", False),
        ("ipc://a:1", "", False),
        ("tcp://a:65536", "", False),
        ("tcp://a:1", "a" * 39, False),
        ("tcp://a:1", "é" * 40, False),
        # Five characters of the alphabet that stand for more than 32 bits.
        ("tcp://a:1", "acAsWNeAVez:1}5wuXfO@pc{OMVqx($T){?kYqPC", False),
    ],
)
def test_what_passes_the_check_is_taken_by_libzmq(endpoint: str, key: str, right: bool):
    if not right:
        with pytest.raises(WireError, match="its next heartbeat may correct that"):
            sockets.check_address("learner", endpoint, key)
        return
    sockets.check_address("learner", endpoint, key)
    connect_dealer(
        zmq.Context.instance(),
        endpoint,
        identity="a",
        server_public=key or None,
        client=new_keys(),
    ).close(0)


def test_an_address_of_another_host_stands_for_the_one_from_which_it_is_reached() -> None:
    assert own_address("127.0.0.1", "10.0.0.1") == "127.0.0.1"
    assert own_address("0.0.0.0", "10.0.0.1") == "0.0.0.0"
    # 192.0.2.0/24 is nobody's (RFC 5737).
    assert own_address("192.0.2.7", "127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no address of this host reaches nowhere"):
        own_address("192.0.2.7", "nowhere.invalid")


def test_an_address_is_held_by_an_interface() -> None:
    assert interface_of("127.0.0.1").startswith("lo")
    with pytest.raises(ConfigError, match=r"no network interface of this host holds .* 192\.0\.2"):
        interface_of("192.0.2.7")
