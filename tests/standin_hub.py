"""A Hugging Face hub on loopback: real files over real HTTP, with the headers that its library asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 39 + "1"
LARGE = 4096
"""Files of this size and more are described by their SHA-256, as the hub does for large ones."""


class StandinHub:
    """Serves folders as repositories."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], dict[str, bytes]] = {}
        self.revisions: dict[tuple[str, str, str], dict[str, bytes]] = {}
        """Files of a repository at a revision that has others than its newest one."""
        self.stall_after: int | None = None
        """Number of bytes of a file after which nothing more is sent, once."""
        self.cut_after: int | None = None
        """Number of bytes of a file after which the connection breaks, once."""
        self.stalled = threading.Event()
        """Whether that has happened."""
        self.flips: dict[str, int] = {}
        """Files of which the byte at a place is served wrong."""
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, path and range of each request."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, kind: str, repo: str, folder: Path, revision: str | None = None) -> None:
        """Serves a folder's files; ``kind`` is ``model`` or ``dataset``.

        Args:
            revision: an older commit of a repository that is there; None = the newest.
        """
        files = {
            str(file.relative_to(folder)): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        if revision is None:
            self.repos[kind, repo] = files
        else:
            self.revisions[kind, repo, revision] = files

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path).strip("/")
        self.requests.append((request.command, path, request.headers.get("Range")))
        for (kind, repo), files in self.repos.items():
            if path.startswith(f"api/{kind}s/{repo}"):
                rest = path.removeprefix(f"api/{kind}s/{repo}").strip("/")
                if rest.startswith("tree/"):
                    return self._send_json(request, self._tree(files))
                if rest == "" or rest.startswith("revision/"):
                    if rest.endswith("parquet"):
                        break
                    asked = rest.removeprefix("revision/")
                    if (older := self.revisions.get((kind, repo, asked))) is not None:
                        return self._send_json(request, {**self._about(repo, older), "sha": asked})
                    return self._send_json(request, self._about(repo, files))
            prefix = f"{repo}/resolve/" if kind == "model" else f"datasets/{repo}/resolve/"
            if path.startswith(prefix):
                revision, _, name = path.removeprefix(prefix).partition("/")
                files = self.revisions.get((kind, repo, revision), files)
                if name in files:
                    return self._send_file(request, name, files[name])
        request.send_response(404)
        request.send_header("X-Error-Code", "RepoNotFound")
        request.send_header("Content-Length", "0")
        request.end_headers()
        return None

    def _about(self, repo: str, files: dict[str, bytes]) -> dict[str, Any]:
        return {"id": repo, "sha": COMMIT, "siblings": [_sibling(*one) for one in files.items()]}

    def _tree(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": _blob(data)}
            for name, data in files.items()
        ]

    def _send_json(self, request: BaseHTTPRequestHandler, content: Any) -> None:
        data = json.dumps(content).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(data)

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest() if len(data) >= LARGE else _blob(data)
        start = 0
        if (asked := request.headers.get("Range")) is not None:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
        if name in self.flips and (place := self.flips[name]) >= start:
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        request.send_response(206 if start else 200)
        request.send_header("ETag", f'"{digest}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(len(data) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.end_headers()
        if request.command != "GET":
            return
        if self.cut_after is not None and len(data) > self.cut_after >= start:
            request.wfile.write(data[start : self.cut_after])
            self.cut_after = None
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        if self.stall_after is not None and len(data) > self.stall_after >= start:
            request.wfile.write(data[start : self.stall_after])
            request.wfile.flush()
            self.stall_after = None
            self.stalled.set()
            with contextlib.suppress(OSError):
                request.rfile.read(1)  # Returns once the other side is gone.
            return
        request.wfile.write(data[start:])


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    large = {
        "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    }
    return {
        "rfilename": name,
        "size": len(data),
        "blobId": _blob(data),
        **(large if len(data) >= LARGE else {}),
    }


def _blob(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
