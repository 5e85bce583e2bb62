"""TLS on both sides: what is trusted, and that a wrong file, certificate or port is told before a start."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from shared_servers import USER, Certificates, allow, joined

from tandem.common.config import ReplayConfig
from tandem.common.errors import StoreError
from tandem.common.run_folder import JoinInfo, RunFolder, read_join
from tandem.launch.host import existing_redis
from tandem.replay.connection import connect
from tandem.replay.store import RunStore

Reach = Callable[..., JoinInfo]


@pytest.fixture(scope="module")
def password(tls_server: Any) -> str:
    return allow(tls_server)


@pytest.fixture
def reach(tls_server: Any, certificates: Certificates, password: str) -> Reach:
    """How a run joins the server, with changes."""

    def made(**changes: Any) -> JoinInfo:
        return joined(tls_server, certificates, password=password, **changes)

    return made


@pytest.fixture
def shows(tls_server: Any, certificates: Certificates) -> Iterator[Callable[..., None]]:
    """Has the server show another certificate."""
    client = tls_server.client()

    def show(pair: tuple[str, str]) -> None:
        client.config_set("tls-cert-file", pair[0], "tls-key-file", pair[1])

    yield show
    show(certificates.server)
    client.close()


def refusal(join: JoinInfo) -> str:
    """What `tandem start` says; what a process says that joins later is the same where it is a matter of TLS."""
    with pytest.raises(StoreError) as told:
        existing_redis.check(join, "process", new=True, filled=False)
    return str(told.value)


def refusals(join: JoinInfo) -> str:
    """The same, which a process that joins is told at once as well."""
    with pytest.raises(StoreError) as told:
        connect(join, deadline=300.0, name="test")
    assert str(told.value) == refusal(join)
    return str(told.value)


def test_a_server_with_tls_and_a_user_of_its_own_holds_a_run(reach: Reach) -> None:
    join = reach(db=2)
    existing_redis.check(join, "process", new=True, filled=False)
    store = connect(join, name="test")
    RunStore(store).set_state("running")
    assert RunStore(store).state() == "running"
    store.call("delete", store.key("meta"))
    store.close()


def test_the_files_are_told_to_joiners_by_their_whole_paths(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_REDIS_PASSWORD", "secret")
    replay = ReplayConfig(
        redis_url="rediss://me@redis.example:6380/4", redis_ca="ca.pem", redis_cert="~/me.pem"
    )
    join, url = existing_redis.joining(replay, "r", None)
    RunFolder(tmp_path).write_join(join)
    join = read_join(tmp_path / "join.json")
    assert (join.ca, join.cert, join.key) == (
        f"{tmp_path}/ca.pem",
        str(Path("~/me.pem").expanduser()),
        None,
    )
    assert (join.tls, join.db, join.username, join.password) == (True, 4, "me", "secret")
    assert url == "rediss://me@redis.example:6380/4"


def test_an_authority_that_is_not_the_servers(reach: Reach, certificates: Certificates) -> None:
    told = refusals(reach(ca=certificates.other_ca))
    assert f"no authority of replay.redis_ca={certificates.other_ca} has signed" in told
    assert "no authority of this host has signed" in refusals(reach(ca=None))


def test_a_certificate_that_has_expired(
    reach: Reach, certificates: Certificates, shows: Any
) -> None:
    shows(certificates.expired)
    assert "has a certificate that has expired: renew it" in refusals(reach())


def test_a_certificate_for_another_name(
    reach: Reach, certificates: Certificates, shows: Any
) -> None:
    shows(certificates.misnamed)
    assert "has a certificate that is for another name than 127.0.0.1" in refusals(reach())


def test_a_client_certificate_that_is_missing(reach: Reach) -> None:
    told = refusals(reach(cert=None, key=None))
    assert "asks for a client certificate: set replay.redis_cert and replay.redis_key" in told


def test_a_client_certificate_of_a_stranger(reach: Reach, certificates: Certificates) -> None:
    cert, key = certificates.strange_client
    told = refusals(reach(cert=cert, key=key))
    assert f"doesn't accept the client certificate {cert}" in told


def test_a_key_of_another_certificate(reach: Reach, certificates: Certificates) -> None:
    told = refusals(reach(key=certificates.server[1]))
    assert "key values mismatch" in told
    assert "belong together" in told


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(
    reach: Reach, certificates: Certificates, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization as forms

    key = forms.load_pem_private_key(Path(certificates.client[1]).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            forms.Encoding.PEM,
            forms.PrivateFormat.TraditionalOpenSSL,
            forms.BestAvailableEncryption(b"open sesame"),
        )
    )
    assert "the key has no passphrase" in refusals(reach(key=str(locked)))


def test_one_file_may_hold_the_certificate_and_its_key(
    reach: Reach, certificates: Certificates, tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join(Path(path).read_bytes() for path in certificates.client))
    connect(reach(cert=str(both), key=None), name="test").close()


@pytest.mark.parametrize("name", ["ca", "cert", "key"])
def test_a_file_that_is_elsewhere_on_this_host(
    reach: Reach, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = reach()
    there = getattr(join, name)
    moved = structs.replace(join, **{name: "/head/tls/file.pem"})
    variable = f"TANDEM_REDIS_{name.upper()}"
    told = refusals(moved)
    assert f"replay.redis_{name}=/head/tls/file.pem can't be read (No such file" in told
    assert f"set {variable}" in told
    monkeypatch.setenv(variable, there)
    connect(moved, name="test").close()


def test_a_file_without_certificates(reach: Reach, certificates: Certificates) -> None:
    told = refusals(reach(ca=certificates.server[1]))
    assert "holds no certificates (PEM)" in told


def test_tls_where_there_is_none(reach: Reach, server: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(existing_redis, "ANSWER_SECONDS", 1.0)
    # Redis waits for the rest of what it takes for a command.
    told = refusal(reach(port=server.port))
    assert "does it speak TLS on that port? (without TLS, write redis://)" in told


def test_tls_where_something_else_answers(reach: Reach) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:
        connections = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(plain.accept()[0])
                    connections[-1].sendall(b"220 mail.example ready\r\n")

        threading.Thread(target=serve, daemon=True).start()
        told = refusals(reach(port=plain.getsockname()[1]))
        plain.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()
    assert "doesn't speak TLS on that port: write redis:// for rediss://" in told


def test_no_tls_where_there_is_nothing_else(reach: Reach, monkeypatch: Any) -> None:
    monkeypatch.setattr(existing_redis, "ANSWER_SECONDS", 1.0)
    assert "does it want TLS (rediss://)?" in refusal(reach(tls=False))


def test_a_password_that_is_wrong_or_missing(reach: Reach) -> None:
    told = refusal(structs.replace(reach(), password="a-wrong-one"))
    assert f"refused the password of user {USER}" in told
    assert "a-wrong-one" not in told
    missing = structs.replace(reach(), username=None, password=None)
    assert "refused a connection without a password" in refusal(missing)


def test_a_renewed_certificate_of_the_server_is_met_by_the_next_connection(
    reach: Reach, certificates: Certificates, shows: Any
) -> None:
    store = connect(reach(), name="test")
    shows(certificates.expired)
    store.redis.connection_pool.disconnect()
    with pytest.raises(StoreError, match="certificate"):
        store.call("time", deadline=0.2)
    shows(certificates.server)
    # A process that is under way waits for the server, as for one that is being restarted.
    assert store.call("time", deadline=20.0)
    store.close()
