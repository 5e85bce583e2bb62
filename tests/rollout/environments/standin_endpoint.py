"""A chat endpoint that stands in for a worker's: sessions by key, and a script in place of a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[list[Mapping[str, Any]]], Mapping[str, Any] | str | None]
"""Takes a request's messages; returns the model's message, its text, or None if the session has no room."""


class StandInEndpoint:
    """Serves until :meth:`close`."""

    def __init__(self) -> None:
        self.sessions: dict[str, Script] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                key = self.headers.get("Authorization", "").removeprefix("Bearer ")
                status, answer = endpoint.answer(self.path, key, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def open(self, key: str, script: Script) -> tuple[str, str]:
        """Opens a session; returns its URL and its key."""
        self.sessions[key] = script
        return f"{self.url}/sessions/{key}/v1", key

    def asked(self, key: str) -> list[dict[str, Any]]:
        """The bodies of a session's requests."""
        return [body for one, body in self.requests if one == key]

    def answer(self, path: str, key: str, body: dict[str, Any]) -> tuple[int, Any]:
        script = self.sessions.get(key)
        if script is None or path != f"/sessions/{key}/v1/chat/completions":
            return 401, {"error": {"message": "no such session", "code": "unauthorized"}}
        self.requests.append((key, body))
        said = script(body["messages"])
        if said is None:
            code = "context_length_exceeded"
            return 400, {"error": {"message": "the session is full", "code": code}}
        message = {"content": said} if isinstance(said, str) else dict(said)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        told = message.pop("tandem", None)
        choice = {
            "index": 0,
            "message": {"role": "assistant", **message},
            "finish_reason": finish,
            **({"tandem": told} if told else {}),
        }
        return 200, {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
        }

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def calling(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    """A tool call in OpenAI's form; arguments that are text are sent as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": f"call-{number}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }
