"""ZeroMQ sockets with CURVE keys, bound to loopback unless configured otherwise."""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from .errors import ConfigError, WireError
from .wire import MAX_MESSAGE_BYTES

WILDCARDS = ("0.0.0.0", "::")
"""Addresses that stand for all of a host's."""
HEARTBEAT_MS = 5_000
"""Time between two heartbeats; a peer that is silent for three of them is disconnected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """A key pair, Z85 text of 40 characters each."""

    public: str
    """May be given to anyone who may connect."""
    secret: str
    """Stays in the process, in Redis (the client's) or in a 0600 file."""

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r}, secret=…)"


def new_keys() -> CurveKeys:
    """A new key pair."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public=public.decode(), secret=secret.decode())


def is_loopback(host: str) -> bool:
    """Whether it is in 127.0.0.0/8, or ::1 or localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def network_name() -> str:
    """A name for this process' network: those with the same name share its loopback addresses. Empty if the system
    doesn't tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


_ENDPOINT = re.compile(
    r"tcp://([a-zA-Z0-9][a-zA-Z0-9._-]{0,252}|\[[0-9a-fA-F:.%]{2,60}\]):([0-9]{1,5})"
)


def check_address(who: str, endpoint: Any, public_key: Any) -> None:
    """Checks where another process claims to listen, before libzmq gets the address.

    Args:
        who: its member id, for the error.
        endpoint: ``tcp://host:port``.
        public_key: Z85 text of 40 characters; None or empty if it has none.

    Raises:
        WireError: nobody can connect to that.
    """
    match = _ENDPOINT.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if match is None or not 0 < int(match[2]) < 65536:
        raise WireError(
            f"{who} says that it listens at {str(endpoint)[:80]!r}, which isn't tcp://host:port: "
            f"its next heartbeat may correct that"
        )
    if public_key and not _is_key(public_key):
        raise WireError(
            f"{who} reports a public key that isn't 40 characters of Z85: its next heartbeat may "
            f"correct that"
        )


def _is_key(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(value) == 40 and len(z85.decode(value)) == 32
    except (KeyError, ValueError, struct.error):
        # Not its alphabet; or five characters that stand for more than 32 bits.
        return False


class Authenticator:
    """Lets only holders of the run's client key connect to this context's servers.

    CURVE alone only proves the server to the client and encrypts; without this, libzmq would let in
    a client with any key of its own.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_public: str) -> None:
        self._allowed = client_public.encode()
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called with the key of a client that connects, as Z85 text (pyzmq has encoded it already)."""
        return key == self._allowed

    def stop(self) -> None:
        """Ends the authentication thread."""
        self._thread.stop()


def to_try(ports: range | None) -> Sequence[int]:
    """The ports that a listener tries, one after the other: 0 for any free one, or those of ``launch.ports``.

    The first of the range is the run's Redis'. The order is random, so that the processes of a host, and one
    process before and after its death, mostly take different ones at once.
    """
    return (0,) if ports is None else random.sample(ports[1:], len(ports) - 1)


def no_port_left(host: str, ports: range) -> ConfigError:
    """The error of a listener that finds every port taken."""
    return ConfigError(
        f"all of the ports {ports[1]} to {ports[-1]} of {host} are taken: widen launch.ports="
        f"{ports[0]}-{ports[-1]}, or name another range"
    )


def is_free(host: str, port: int) -> bool:
    """Whether a port of this host can be listened on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Lingering connections of a process that has ended keep nobody from listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def bind_free(listener: socket.socket, host: str, ports: range | None) -> int:
    """Binds a TCP socket to a free port of ``launch.ports``, and returns it.

    Raises:
        ConfigError: none of the range is free.
    """
    for port in to_try(ports):
        try:
            listener.bind((host, port))
            return int(listener.getsockname()[1])
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
    assert ports is not None
    raise no_port_left(host, ports)


def free_listener(host: str, ports: range | None) -> socket.socket:
    """A TCP socket that is bound to a free port of ``launch.ports``.

    Raises:
        ConfigError: none of the range is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bind_free(listener, host, ports)
    except BaseException:
        listener.close()
        raise
    return listener


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    keys: CurveKeys | None,
    ports: range | None = None,
) -> tuple[zmq.Socket[bytes], str]:
    """Binds a ROUTER to a free port of ``launch.ports``, by default to any; returns it with its endpoint.

    Raises:
        ConfigError: the address is beyond loopback, and there are no keys; or no port of the range is free.
    """
    if keys is None and not is_loopback(host):
        raise ConfigError(
            f"refused to bind {host} without CURVE keys: bind 127.0.0.1, or start the run with keys"
        )
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
        host = f"[{host}]"
    for port in to_try(ports):
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
            continue
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
    assert ports is not None
    socket.close()
    raise no_port_left(host, ports)


def reachable(endpoint: str, host: str, port: int) -> str:
    """An endpoint that others can connect to: a wildcard address becomes this host's own, as ``host`` sees it."""
    address, _, own_port = endpoint.removeprefix("tcp://").rpartition(":")
    if address.strip("[]") not in (*WILDCARDS, "*"):
        return endpoint
    own = address_towards(host, port)
    return f"tcp://[{own}]:{own_port}" if ":" in own else f"tcp://{own}:{own_port}"


def address_towards(host: str, port: int = 9) -> str:
    """The address of this host from which another one is reached.

    Raises:
        ConfigError: no address of this host reaches it.
    """
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket sends nothing; it only consults the routing table.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"no address of this host reaches {host}: {error}") from None


def own_address(bind: str, facing: str) -> str:
    """What a socket of this host binds for ``launch.bind``, which may be the address of another host.

    Args:
        bind: the setting, which all hosts of a run share.
        facing: the host from which others come (``Config.facing``).

    Raises:
        ConfigError: no address of this host reaches ``facing``.
    """
    mine = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    if bind in mine or bind in WILDCARDS or is_loopback(bind):
        return bind
    return address_towards(facing)


def interface_of(address: str) -> str:
    """The name of the network interface that holds an address of this host; names differ between hosts.

    Raises:
        ConfigError: none does.
    """
    found = psutil.net_if_addrs()
    for name, entries in found.items():
        # A link-local IPv6 address carries its interface: fe80::1%eth0.
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return name
    if is_loopback(address):
        return interface_of("127.0.0.1")
    raise ConfigError(
        f"no network interface of this host holds the address {address} (there are: {', '.join(found)})"
    )


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    *,
    identity: str,
    server_public: str | None,
    client: CurveKeys | None,
    connect: bool = True,
) -> zmq.Socket[bytes]:
    """A DEALER to one server; it queues nothing for a server that isn't connected.

    With ``connect=False`` the caller connects: to hear of the handshake, it must attach its monitor
    before that, or may miss the event for good.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    # A host that vanishes closes nothing: without these, its silence lasts until TCP gives up.
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt_string(zmq.IDENTITY, identity)
    if server_public is not None and client is not None:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, client.secret)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, client.public)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    if connect:
        socket.connect(endpoint)
    return socket


def local_address(interface: str, facing: str | None = None) -> str:
    """The one address of this host that the weight channel binds.

    Args:
        interface: an address or the name of a network interface. An address of another host
            (all hosts of the run share the setting) stands for the address of this host from
            which that one, or ``facing``, is reached.
        facing: host of the other side.

    Raises:
        ConfigError: it would listen everywhere, or names nothing on this host.
    """
    addresses = psutil.net_if_addrs()
    if interface in addresses:
        for family in (socket.AF_INET, socket.AF_INET6):
            for entry in addresses[interface]:
                if entry.family == family:
                    return entry.address
        raise ConfigError(f"weights.interface={interface} has no IP address on this host")
    try:
        wanted = ipaddress.ip_address(interface)
    except ValueError:
        raise ConfigError(
            f"weights.interface={interface} is neither an address nor an interface of this host "
            f"(there are: {', '.join(addresses)})"
        ) from None
    if wanted.is_unspecified:
        raise ConfigError(
            f"refused weights.interface={interface}: the weight channel has no credentials of its "
            f"own, so it binds loopback or one private address, never all of them"
        )
    mine = {entry.address for entries in addresses.values() for entry in entries}
    if interface in mine or wanted.is_loopback:
        return interface
    return address_towards(facing or interface)
