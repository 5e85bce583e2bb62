"""Answers by an OpenAI-compatible server elsewhere, in the place of an engine.

A prompt that is a conversation (template ``own``) goes to ``/v1/chat/completions`` as messages, which the server's own
chat template renders; any other goes to ``/v1/completions`` as text. Tokens and log-probs aren't known here: their
number is what the server says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ...common.errors import ConfigError
from ...common.records import FinishReason, Sample, Source
from ...common.seeds import keyed_seed
from ...reward.exchange import Address, Exchange, ExchangeError
from ..engine import FinishedGroup, GroupRequest

RETRIES = 6
"""Attempts after the first."""
LONGEST_PAUSE = 30.0
REFUSALS = (400, 413, 422)
"""Statuses with which a server refuses one prompt, and not whoever asks."""
TOKENS_UNKNOWN = -1
"""In the place of tokens whose number alone is known."""


class Elsewhere:
    """A model that a server has.

    Args:
        model: its name there.
        url: its address; ``/v1/…`` is added.
        key_variable: environment variable with its key.
        parallel: requests at a time.
        seconds: longest silence of the server; an answer comes as a whole, so that all of it is made meanwhile.

    Raises:
        ConfigError: the address isn't one.
    """

    def __init__(
        self,
        model: str,
        url: str,
        *,
        key_variable: str | None = None,
        parallel: int,
        seconds: float,
    ) -> None:
        try:
            self._address = Address.of(url, key_variable)
        except ValueError as error:
            raise ConfigError(f"--endpoint: {error}") from None
        self._model = model
        self._seconds = seconds
        self._running: dict[int, Exchange] = {}
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="endpoint")

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        """Yields each request's answer as it comes; one that fails for good has an error."""
        tasks = [asyncio.create_task(self._answered(request)) for request in requests]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Ends the requests that are under way, and the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for exchange in list(self._running.values()):
            exchange.abort()

    async def _answered(self, request: GroupRequest) -> FinishedGroup:
        pause = 0.5
        for attempt in range(RETRIES + 1):
            try:
                loop = asyncio.get_running_loop()
                sample = await loop.run_in_executor(self._threads, self._ask, request)
                return FinishedGroup(group_id=request.group_id, samples=(sample,))
            except ExchangeError as error:
                if not error.again or attempt == RETRIES:
                    way_out = ": raise --request-seconds" if error.late else ""
                    what = f"{self._address.url}: {error}{way_out}"
                    return FinishedGroup(
                        group_id=request.group_id,
                        samples=(),
                        error=what,
                        refused=error.status in REFUSALS,
                    )
                await asyncio.sleep(min(LONGEST_PAUSE, max(pause, error.after)))
                pause *= 2
        raise AssertionError("the last attempt has returned")

    def _ask(self, request: GroupRequest) -> Sample:
        path, body = request_of(request, self._model)
        exchange = Exchange(
            address=self._address.at(path), body=json.dumps(body).encode(), seconds=self._seconds
        )
        self._running[id(exchange)] = exchange
        try:
            return sample_of(request, exchange.run())
        finally:
            del self._running[id(exchange)]


def request_of(request: GroupRequest, model: str) -> tuple[str, dict[str, Any]]:
    """The path and the body of one answer's request."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        # Servers take 31 bits.
        "seed": keyed_seed(request.seed, request.group_id) & 0x7FFFFFFF,
    }
    if request.stop:
        # The grader reads closing tags; vLLM and Tandem keep them if they are asked to.
        body |= {"stop": list(request.stop), "include_stop_str_in_output": True}
    if messages := conversation(request.prompt_text):
        return "/v1/chat/completions", {**body, "messages": messages}
    return "/v1/completions", {**body, "prompt": request.prompt_text}


def conversation(text: str) -> list[dict[str, str]] | None:
    """The messages that a prompt is the JSON of; None if it is a text."""
    if not text.startswith('[{"role": '):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


def sample_of(request: GroupRequest, answer: bytes) -> Sample:
    """Reads a server's answer.

    Raises:
        ExchangeError: it has no text.
    """
    try:
        content = json.loads(answer)
        choice = content["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        if text is None and "message" in choice:
            # So chats say that there is no text: Tandem's, and vLLM's where all of it was reasoning.
            text = ""
        reason = choice.get("finish_reason")
        usage = content.get("usage") or {}
        count = usage.get("completion_tokens", 0) if isinstance(usage, Mapping) else 0
        if not isinstance(text, str) or not isinstance(count, int) or not 0 <= count < 2**24:
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ExchangeError(f"its answer has no text: {answer[:200]!r}", again=False) from None
    return Sample(
        tokens=np.full(count, TOKENS_UNKNOWN, np.int32),
        source=np.full(count, Source.OWN, np.uint8),
        logprobs=np.full(count, np.nan, np.float32),
        spans=(),
        finish_reason=FinishReason.LENGTH if reason == "length" else FinishReason.STOP,
        sampling=request.sampling,
        text=text.encode("utf-8", "replace").decode(),
        reward=None,
        verdict=None,
        components={},
        extracted=None,
        grader=None,
    )
