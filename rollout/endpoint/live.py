"""Server-sent events: answers that are sent while they are sampled, and those that are sent afterwards."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from aiohttp import web

T = TypeVar("T")

END_SECONDS = 30.0
"""How long an answer may take to end at its next token."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token of one byte, as tokenizers with the decoder ``ByteFallback`` have them."""


def chat_deltas(number: int, text: str, is_first: bool) -> list[dict[str, Any]]:
    """The choices of events with the next text of an answer."""
    deltas = [{"role": "assistant", "content": ""}] if is_first else []
    deltas += [{"content": text}] if text else []
    return [{"index": number, "delta": delta, "finish_reason": None} for delta in deltas]


def completion_deltas(number: int, text: str, is_first: bool) -> list[dict[str, Any]]:
    """The choices of events with the next text of an answer."""
    return (
        [{"index": number, "text": text, "finish_reason": None, "logprobs": None}] if text else []
    )


class GrowingText:
    """The text of an answer that is being sampled.

    Args:
        backend: a tokenizer of the library tokenizers.
        stops: texts of which a client gets nothing; what may become one is held back.
    """

    def __init__(self, backend: Any, stops: Sequence[str]) -> None:
        from tokenizers.decoders import DecodeStream

        self._decoder = DecodeStream(skip_special_tokens=True)
        self._open: list[int] = []
        self._backend = backend
        self._stops = stops
        self._text = ""
        self.sent = ""
        """What :meth:`add` has returned so far."""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that can be sent now that these tokens have been sampled as well."""
        for token in tokens:
            self._open.append(token)
            if self._is_whole(token):
                self._text += self._decoder.step(self._backend, self._open) or ""
                self._open.clear()
        more = self._text[len(self.sent) : self._certain()]
        self.sent += more
        return more

    def _is_whole(self, token: int) -> bool:
        """Whether what follows leaves the text up to this token as it is. Bytes that are tokens become characters
        together with those that follow, also behind a token without a text, and what has become another text is an
        error of the decoder's."""
        if _BYTE.fullmatch(self._backend.id_to_token(token) or ""):
            return False
        return bool(self._backend.decode([token], skip_special_tokens=True))

    def _certain(self) -> int:
        """Number of characters that belong to the answer whatever follows."""
        # None begins in what was sent: its beginning would have been held back.
        since = len(self.sent)
        found = [place for stop in self._stops if (place := self._text.find(stop, since)) >= 0]
        if found:
            return min(found)
        held = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(self._text)), 0, -1)
            if self._text.endswith(stop[:size])
        )
        return len(self._text) - max(held, default=0)


class EventStream:
    """The events of one request. The response begins with the first of them, so that until then an error is
    answered with a status of its own.

    Args:
        request: what is answered.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    async def write(self, event: bytes) -> None:
        """Sends one event; nothing happens if the client has gone, by which the request is cancelled."""
        from aiohttp import web

        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await self._response.prepare(self._request)
        with suppress(ConnectionResetError):
            await self._response.write(b"data: " + event + b"\n\n")

    async def end(self, *events: bytes) -> web.StreamResponse:
        """Sends the last events."""
        for event in (*events, b"[DONE]"):
            await self.write(event)
        assert self._response is not None
        with suppress(ConnectionResetError):
            await self._response.write_eof()
        return self._response


class LiveStream(EventStream):
    """Answers that are sent while they are sampled.

    Args:
        request: what is answered.
        kind: ``object`` of the events.
        model: the model's name.
        backend: a tokenizer of the library tokenizers.
        stops: texts that end an answer, and of which a client gets nothing.
    """

    def __init__(
        self,
        request: web.Request,
        kind: str,
        model: str,
        backend: Any,
        stops: Sequence[str],
    ) -> None:
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        super().__init__(request)
        self.stamp = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        """What all events have in common, those of the whole answer too."""
        self._head = {**self.stamp, "object": kind, "model": model}
        self._deltas = completion_deltas if kind == "text_completion" else chat_deltas
        self._backend = backend
        self._stops = stops
        self._texts: dict[int, GrowingText] = {}
        self._sampled: asyncio.Queue[tuple[int, Sequence[int]]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def follow(self, number: int) -> Callable[[Sequence[int]], None]:
        """What the engine calls with the new tokens of an answer, from any thread."""

        def sampled(tokens: Sequence[int]) -> None:
            with suppress(RuntimeError):  # The loop is closed: nobody waits for them any more.
                self._loop.call_soon_threadsafe(self._sampled.put_nowait, (number, tokens))

        return sampled

    def sent(self, number: int) -> str | None:
        """What was sent of an answer; None if nothing was, not even its beginning."""
        text = self._texts.get(number)
        return None if text is None else text.sent

    async def during(
        self, sampling: Awaitable[T], end: Callable[[], Awaitable[None]] | None = None
    ) -> T:
        """Sends texts until the sampling is done; returns its result.

        Args:
            sampling: what gives the answers.
            end: ends the sampling, with what it has, if the client leaves with a part of the answer; None = what
                was sampled is of no use then.
        """
        task = asyncio.ensure_future(sampling)
        try:
            while not task.done():
                getting = asyncio.ensure_future(self._sampled.get())
                try:
                    await asyncio.wait([task, getting], return_when=asyncio.FIRST_COMPLETED)
                    if getting.done():
                        await self._send(*getting.result())
                finally:
                    getting.cancel()
            return task.result()
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if end is None or not self.has_begun or asking is None:
                raise
            asking.uncancel()
            await end()
            return await asyncio.wait_for(task, END_SECONDS)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def _send(self, number: int, tokens: Sequence[int]) -> None:
        is_first = number not in self._texts
        if is_first:
            self._texts[number] = GrowingText(self._backend, self._stops)
        more = self._texts[number].add(tokens)
        for choice in self._deltas(number, more, is_first):
            await self.write(json.dumps({**self._head, "choices": [choice]}).encode())
