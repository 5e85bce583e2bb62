"""One HTTP request to a server that isn't trusted to answer well: bounded in time and in size.

Redirects aren't followed, since a key must not go to another host; certificates are checked; proxies of
the environment aren't used. A call blocks its thread, and another thread may end it at any time.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ..common.errors import ConfigError, TandemError
from ..common.printable import printable

MAX_BYTES = 1 << 20
"""Longest answer that is read, in bytes."""
CHUNK = 1 << 16
SHOWN = 200
"""Characters of an answer that an error shows."""


class ExchangeError(TandemError):
    """There is no answer that could be used; the message says why, in one line.

    Args:
        again: whether another attempt may succeed.
        after: seconds that the server asks to wait before it.
        status: the answer's status; None if none came.
        late: whether the time was up.
    """

    def __init__(
        self,
        message: str,
        *,
        again: bool = True,
        after: float = 0.0,
        status: int | None = None,
        late: bool = False,
    ) -> None:
        super().__init__(message)
        self.again = again
        self.after = after
        self.status = status
        self.late = late


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where requests go."""

    url: str
    """``http://host:port/path`` without a slash at its end."""
    key_variable: str | None = None
    """Environment variable that holds the key; it is read at each request, and stored nowhere."""

    @classmethod
    def of(cls, url: str, key_variable: str | None) -> Address:
        """Checks an address.

        Raises:
            ValueError: it isn't one that can be asked.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url={url!r} isn't an address: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ValueError(f"url={url!r} should be http://HOST:PORT or https://HOST")
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "url holds a user's name or password, which the run's files would show: "
                "name an environment variable with api_key_env"
            )
        if parts.query or parts.fragment or not url.isascii() or any(c <= " " for c in url):
            raise ValueError(f"url={url!r} should end with the server's path, as in …:8000")
        return cls(url=url.rstrip("/"), key_variable=key_variable)

    def at(self, path: str) -> Address:
        """The same server at a path below, as ``/v1/models``; a ``/v1`` at the end of the url counts."""
        base = self.url.removesuffix("/v1") if path.startswith("/v1/") else self.url
        return Address(url=base + path, key_variable=self.key_variable)

    def headers(self) -> dict[str, str]:
        """Headers of a request.

        Raises:
            ConfigError: the variable with the key isn't set, or no header can hold it.
        """
        headers = {"Accept": "application/json", "User-Agent": "tandem"}
        if self.key_variable is not None:
            key = os.environ.get(self.key_variable, "").strip()
            if not key:
                raise ConfigError(
                    f"the environment variable {self.key_variable} (api_key_env) isn't set where "
                    f"the reward is computed: export it before the command"
                )
            if not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"the environment variable {self.key_variable} (api_key_env) holds characters "
                    f"that no HTTP header can: set it to the key alone"
                )
            headers["Authorization"] = f"Bearer {key}"
        return headers


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request, and its answer.

    Args:
        address: the address with its path.
        body: JSON to post; None = a GET.
        seconds: time for each step. Who needs a deadline for the whole call :meth:`abort` at it.
    """

    address: Address
    body: bytes | None
    seconds: float
    _held: socket.socket | None = None
    _aborted: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> bytes:
        """The body of a successful answer (status 200).

        Raises:
            ExchangeError: there is none.
            ConfigError: the key is missing.
        """
        headers = self.address.headers()
        if self.body is not None:
            headers["Content-Type"] = "application/json"
        try:
            return self._ask(headers)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._aborted:
                raise ExchangeError(f"no complete answer within {self.seconds:g} s") from None
            again = not isinstance(error, ssl.SSLCertVerificationError)
            late = isinstance(error, TimeoutError)
            raise ExchangeError(_in_words(error, self.seconds), again=again, late=late) from None
        finally:
            with self._lock:
                if self._held is not None:
                    self._held.close()
                    self._held = None

    def abort(self) -> None:
        """Ends the call from another thread, wherever it is."""
        with self._lock:
            self._aborted = True
            if self._held is not None:
                try:
                    # Of the plain socket, also below TLS: whoever reads it wakes up.
                    socket.socket.shutdown(self._held, socket.SHUT_RDWR)
                except OSError:
                    pass  # It is closed already.

    def _ask(self, headers: Mapping[str, str]) -> bytes:
        parts = urllib.parse.urlsplit(self.address.url)
        host, context = parts.hostname or "", None
        connection = http.client.HTTPConnection(host, parts.port)
        if parts.scheme == "https":
            context = _context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
            connection = http.client.HTTPSConnection(host, parts.port, context=context)
        held = socket.create_connection((host, connection.port), self.seconds)
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            held = context.wrap_socket(held, server_hostname=host, do_handshake_on_connect=False)
        connection.sock = held
        with self._lock:
            # The connection forgets it where the server announces to close.
            self._held = held
            if self._aborted:
                raise ConnectionAbortedError
        if isinstance(held, ssl.SSLSocket):
            held.do_handshake()
        method = "GET" if self.body is None else "POST"
        connection.request(method, parts.path or "/", self.body, dict(headers))
        received = bytearray()
        with connection.getresponse() as answer:
            while chunk := answer.read1(CHUNK):
                received += chunk
                if len(received) > MAX_BYTES:
                    raise ExchangeError(f"its answer is longer than {MAX_BYTES:,} bytes")
        if self._aborted or (answer.length or 0) > 0:
            raise ConnectionResetError("it ended in the middle of its answer")
        if answer.status == 200:
            return bytes(received)
        raise _refused(answer, bytes(received))


@lru_cache(maxsize=4)
def _context(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Checks certificates and names, by the system's authorities or those of the two variables."""
    return ssl.create_default_context()


def _refused(answer: http.client.HTTPResponse, body: bytes) -> ExchangeError:
    status = answer.status
    if 300 <= status < 400:
        target = printable(str(answer.headers.get("Location", "nowhere")))[:SHOWN]
        return ExchangeError(
            f"it redirects (status {status}) to {target}, which isn't followed: name the final "
            f"address as url",
            again=False,
            status=status,
        )
    after = str(answer.headers.get("Retry-After", ""))
    return ExchangeError(
        f"status {status}: {shown(body)}",
        # Too early, too many, or the server's own fault; any other request would be refused again.
        again=status in (408, 425, 429) or status >= 500,
        after=float(after) if after.isascii() and after.isdigit() and len(after) < 6 else 0.0,
        status=status,
    )


def shown(body: bytes) -> str:
    """The beginning of an answer, as one line."""
    text = " ".join(printable(body[: 4 * SHOWN].decode("utf-8", "replace")).split())
    return repr(text[:SHOWN] + ("…" if len(text) > SHOWN else ""))


def _in_words(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {seconds:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate isn't trusted: {error.verify_message}"
    return f"{type(error).__name__}: {' '.join(printable(str(error)).split())[:SHOWN]}"
