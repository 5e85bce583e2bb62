"""How a process reaches the run's Redis: its address, TLS, and the errors that no waiting mends."""

from __future__ import annotations

import inspect
import os
import ssl
from collections.abc import Iterator
from typing import Any

import redis
from msgspec import structs
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..common.errors import StoreError
from ..common.run_folder import JoinInfo

VARIABLES = {"ca": "TANDEM_REDIS_CA", "cert": "TANDEM_REDIS_CERT", "key": "TANDEM_REDIS_KEY"}
"""Environment variables that say where the files of TLS are on this host, if not where the join file says."""
SETTINGS = {"ca": "replay.redis_ca", "cert": "replay.redis_cert", "key": "replay.redis_key"}

# From openssl's x509_vfy.h.
_NOT_YET_VALID, _EXPIRED = 9, 10
_OTHER_NAME = (62, 64)
_NO_AUTHORITY = (2, 18, 19, 20, 21)


def on_this_host(join: JoinInfo) -> JoinInfo:
    """The same with the files of TLS where they are on this host."""
    named = {
        name: os.environ[variable]
        for name, variable in VARIABLES.items()
        if os.environ.get(variable)
    }
    return structs.replace(join, **named) if join.tls else join


def make_client(join: JoinInfo, *, timeout: float, name: str = "") -> redis.Redis:
    """A client that repeats nothing by itself.

    Args:
        timeout: seconds for an answer, and for a connection, which has 5 at most.
        name: name of the connections, for ``CLIENT LIST``.

    Raises:
        StoreError: a file of TLS is missing or isn't what it should be.
    """
    # Redis before 7.2 doesn't know the command by which a library tells its name, and no ACL need permit it.
    known = inspect.signature(redis.Redis).parameters
    silent = ("driver_info",) if "driver_info" in known else ("lib_name", "lib_version")
    options: dict[str, Any] = dict.fromkeys(silent)
    if join.tls:
        options |= _tls(on_this_host(join))
    return redis.Redis(
        host=join.host,
        port=join.port,
        db=join.db,
        username=join.username,
        password=join.password,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=min(5.0, timeout),
        socket_timeout=timeout,
        socket_keepalive=True,
        health_check_interval=0,
        retry=Retry(NoBackoff(), 0),
        client_name=f"tandem:{name}" if name else None,
        **options,
    )


def _tls(join: JoinInfo) -> dict[str, Any]:
    """What redis-py is told of TLS; it reads the files anew for each connection."""
    context = ssl.create_default_context()
    if join.ca:
        try:
            context.load_verify_locations(cafile=join.ca)
        except OSError as error:  # An SSLError is one, too.
            raise _unreadable(join, "ca", error, "no certificates (PEM)") from None
    if join.cert:
        for name in ("cert", "key"):
            path = getattr(join, name)
            try:
                if path:
                    open(path, "rb").close()
            except OSError as error:
                raise _unreadable(join, name, error, "") from None
        try:
            # Of a key with a passphrase openssl would ask for it on the terminal.
            context.load_cert_chain(join.cert, join.key, password="")
        except OSError as error:
            raise StoreError(
                f"the client certificate {join.cert} and the key {join.key or 'in it'} for Redis can't "
                f"be used ({_ssl_text(error)}): they must be PEM, belong together, and the key has no "
                f"passphrase"
            ) from None
    return {
        "ssl": True,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        "ssl_ca_certs": join.ca,
        "ssl_certfile": join.cert,
        "ssl_keyfile": join.key,
        "ssl_password": "",
    }


def _unreadable(join: JoinInfo, name: str, error: OSError, holds: str) -> StoreError:
    isnt = isinstance(error, ssl.SSLError)
    why = f"holds {holds}" if isnt else f"can't be read ({error.strerror})"
    return StoreError(
        f"{SETTINGS[name]}={getattr(join, name)} {why}: name the right file, or, where it is in "
        f"another place on this host, set {VARIABLES[name]}"
    )


def refusal(error: BaseException, join: JoinInfo) -> str | None:
    """Why this Redis can't be used, in words; None if it may come up yet.

    Args:
        error: an error of redis-py.
        join: how the connection was made.
    """
    where = f"Redis at {join.host}:{join.port}"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"{where} has a certificate that {_untrusted(cause, join)}"
        if isinstance(cause, ssl.SSLError):
            told = _alert(str(cause.reason or ""), join)
            if told:
                return f"{where} {told}"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _untrusted(error: ssl.SSLCertVerificationError, join: JoinInfo) -> str:
    code = error.verify_code
    if code in _NO_AUTHORITY:
        authority = on_this_host(join).ca
        known = f"{SETTINGS['ca']}={authority}" if authority else "this host"
        return (
            f"no authority of {known} has signed ({error.verify_message}): name the file with the "
            f"certificate of its own authority in {SETTINGS['ca']}"
        )
    if code == _EXPIRED:
        return "has expired: renew it, and look at this host's clock"
    if code == _NOT_YET_VALID:
        return "isn't valid yet: look at the clocks of both hosts"
    if code in _OTHER_NAME:
        return (
            f"is for another name than {join.host}: write the name that is in the certificate into "
            f"replay.redis_url, or have {join.host} put among its names (subjectAltName)"
        )
    return f"can't be trusted ({error.verify_message}): have it made anew, or name its authority in {SETTINGS['ca']}"


def _alert(reason: str, join: JoinInfo) -> str | None:
    """What the failure of a handshake means, by openssl's name of it."""
    if "CERTIFICATE_REQUIRED" in reason or ("HANDSHAKE_FAILURE" in reason and not join.cert):
        return f"asks for a client certificate: set {SETTINGS['cert']} and {SETTINGS['key']}"
    if "ALERT" in reason and any(
        word in reason for word in ("UNKNOWN_CA", "CERTIFICATE", "ACCESS_DENIED", "DECRYPT_ERROR")
    ):
        own = on_this_host(join).cert
        return (
            f"doesn't accept the client certificate {own} ({reason.lower().replace('_', ' ')}): have it "
            f"signed by an authority that the server knows (its tls-ca-cert-file)"
        )
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return "doesn't speak TLS on that port: write redis:// for rediss://, or name its TLS port"
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return "speaks no TLS 1.2 or newer: allow it there (tls-protocols)"
    return None


def _ssl_text(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else str(error)
