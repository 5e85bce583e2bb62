"""A small client of the worker's endpoint, over ``http.client``, for the forms whose loop is ours."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

KEEP_SECONDS = 15.0
"""An idle connection older than this is opened anew: the endpoint may be about to close it, and a request
that got lost on the way can't be sent twice without sampling twice."""
MAX_ANSWER_BYTES = 32 << 20
CONTEXT_CODE = "context_length_exceeded"


class EpisodeTooLong(Exception):
    """The session has no room for another turn: the episode is over, and hasn't failed."""


class ModelError(Exception):
    """The endpoint refused a request, or can't be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn of the model."""

    message: Mapping[str, Any]
    """As it goes into the history."""
    text: str
    """Text of the message, empty if there is none."""
    calls: Sequence[Mapping[str, Any]]
    """Tool calls of the message."""
    malformed: int
    """Number of tool calls that couldn't be parsed."""
    finish_reason: str | None


class Asker:
    """One session of the endpoint.

    Args:
        base_url: the session's URL, which ends in ``/v1``.
        api_key: the session's key.
        model: the name in each request.
        sampling: further keys of each request.
        seconds: time until the episode's deadline.
    """

    def __init__(
        self, base_url: str, api_key: str, model: str, sampling: Mapping[str, Any], seconds: float
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ModelError("the session's URL isn't one of HTTP")
        self._parts = parts
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._fixed = {"model": model, **sampling}
        self._end = time.monotonic() + seconds
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Answer:
        """Asks for the next turn.

        Raises:
            EpisodeTooLong: the session has no room for it.
            ModelError: there is no answer.
        """
        body: dict[str, Any] = {**self._fixed, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        status, answer = self._post(body)
        if status != 200:
            _raise(status, answer)
        return _read(answer)

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        left = self._end - time.monotonic()
        if left <= 0:
            raise ModelError("the episode's deadline has passed")
        try:
            connection = self._connect(left)
            path = self._parts.path.rstrip("/") + "/chat/completions"
            connection.request("POST", path, data, self._headers)
            response = connection.getresponse()
            content = response.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ModelError(f"the model's endpoint doesn't answer: {error!r:.200}") from None
        if len(content) > MAX_ANSWER_BYTES:
            self.close()
            raise ModelError(f"the model's endpoint answered with over {MAX_ANSWER_BYTES:,} bytes")
        self._used = time.monotonic()
        try:
            return response.status, json.loads(content)
        except ValueError:
            return response.status, None

    def _connect(self, left: float) -> http.client.HTTPConnection:
        if self._connection is not None and time.monotonic() - self._used > KEEP_SECONDS:
            self.close()
        if self._connection is None:
            host, port = str(self._parts.hostname), self._parts.port
            if self._parts.scheme == "https":
                context = ssl.create_default_context()
                self._connection = http.client.HTTPSConnection(host, port, context=context)
            else:
                self._connection = http.client.HTTPConnection(host, port)
        self._connection.timeout = left
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left)
        return self._connection


def _raise(status: int, answer: Any) -> None:
    error = answer.get("error") if isinstance(answer, dict) else None
    error = error if isinstance(error, dict) else {}
    if status == 400 and error.get("code") == CONTEXT_CODE:
        raise EpisodeTooLong(str(error.get("message", ""))[:200])
    raise ModelError(
        f"the model's endpoint answered {status}: {str(error.get('message', ''))[:300]}"
    )


def _read(answer: Any) -> Answer:
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content, calls = message.get("content"), message.get("tool_calls") or []
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ModelError(
            "the model's endpoint answered with something other than a message"
        ) from None
    text = content if isinstance(content, str) else ""
    kept = {"role": "assistant", "content": content}
    kept |= {k: message[k] for k in ("tool_calls", "reasoning_content") if message.get(k)}
    own = choice.get("tandem")
    malformed = own.get("malformed_tool_calls") if isinstance(own, dict) else 0
    return Answer(
        message=kept,
        text=text,
        calls=[call for call in calls if isinstance(call, dict)],
        malformed=malformed if isinstance(malformed, int) else 0,
        finish_reason=choice.get("finish_reason"),
    )
