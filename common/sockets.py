"""ZeroMQ sockets with CURVE keys, bound to loopback unless configured otherwise."""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from dataclasses import dataclass
from typing import Any

import psutil
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from .errors import ConfigError, WireError
from .wire import MAX_MESSAGE_BYTES

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


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], host: str, keys: CurveKeys | None
) -> tuple[zmq.Socket[bytes], str]:
    """Binds a ROUTER to an ephemeral port; returns it with its endpoint.

    Raises:
        ConfigError: the address is beyond loopback, and there are no keys.
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
    port = socket.bind_to_random_port(f"tcp://{host}")
    return socket, f"tcp://{host}:{port}"


def reachable(endpoint: str, host: str, port: int) -> str:
    """An endpoint that others can connect to: a wildcard address becomes this host's own, as ``host`` sees it."""
    address, _, own_port = endpoint.removeprefix("tcp://").rpartition(":")
    if address.strip("[]") not in ("0.0.0.0", "::", "*"):
        return endpoint
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Nothing is sent: connecting a datagram socket only picks the interface towards the host.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own = probe.getsockname()[0]
    return f"tcp://[{own}]:{own_port}" if ":" in own else f"tcp://{own}:{own_port}"


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
    family = socket.AF_INET6 if wanted.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only consults the routing table.
        try:
            probe.connect((facing or interface, 9))
        except OSError as error:
            raise ConfigError(
                f"no address of this host reaches {facing or interface}: {error}"
            ) from None
        return str(probe.getsockname()[0])
