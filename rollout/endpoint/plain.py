"""Requests without a session: what bounds them, and how they are sampled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from msgspec.structs import replace

from ...common.errors import DataError, TandemError
from ...common.records import SamplingParams
from ..engine import Engine, Likeliest
from .forms import Part
from .requests import Wanted
from .sessions import Session, SessionSpec

T = TypeVar("T")

MOST_REQUESTS = 1 << 20
"""Requests of a session that isn't recorded, of which there is one an answer."""


class EngineError(TandemError):
    """The engine couldn't sample a turn, or score one."""


class BusyError(TandemError):
    """More answers are being sampled already than there is room for."""


class Vouch(Protocol):
    """Answers for the engine's weights."""

    async def __call__(self, work: Callable[[], Awaitable[T]]) -> T:
        """Result of some work with the engine, which may be done several times.

        Raises:
            EngineError: no result can be trusted.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds requests without a session."""

    seconds: float | None = None
    """How long a request may take; None = as long as it does."""
    answers: int = 1 << 14
    """Answers that may be under way at a time, those that wait for a place in the engine among them."""


class Plain:
    """Makes the sessions of such requests, one an answer, which end with it.

    Args:
        limits: what bounds them.
        context: tokens of prompt and answer.
    """

    def __init__(self, limits: Limits, context: int) -> None:
        self.limits = limits
        self._context = context
        self._number = 0
        self._under_way = 0
        # Another one in every process, so that a second evaluation doesn't repeat the first one's samples.
        self._seed = secrets.randbits(62)

    def session(self) -> Session:
        """A session without a key: nothing is recorded, and the request's own sampling counts."""
        self._number += 1
        sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=self._context)
        spec = SessionSpec(
            name=f"open/{self._number}",
            sampling=sampling,
            seed=self._seed,
            longest=self._context,
            max_turns=MOST_REQUESTS,
        )
        return Session("", "", spec, self._context)

    async def together(self, answers: Sequence[Awaitable[T]]) -> list[T]:
        """Waits for several answers; if one fails, the others are given up.

        Raises:
            BusyError: too many are under way.
        """
        tasks = [asyncio.ensure_future(answer) for answer in answers]
        try:
            if self._under_way + len(tasks) > self.limits.answers:
                raise BusyError(
                    f"{self._under_way:,} answers are under way, and there is room for "
                    f"{self.limits.answers:,}: ask again later, or for fewer at a time"
                )
            self._under_way += len(tasks)
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                self._under_way -= len(tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


def sampling_of(sampling: SamplingParams, want: Wanted) -> SamplingParams:
    """The distribution that a request without a session asks for.

    Raises:
        DataError: no engine can draw from it.
    """
    given = dict(want.sampling)
    for name in ("presence_penalty", "frequency_penalty", "min_p"):
        if given.pop(name, 0.0):
            raise DataError(f"{name} isn't supported: leave it out")
    try:
        return replace(
            sampling,
            temperature=given.get("temperature", sampling.temperature),
            top_p=given.get("top_p", sampling.top_p),
            top_k=max(0, int(given.get("top_k", sampling.top_k))),
        )
    except ValueError as error:
        raise DataError(str(error)) from None


async def add_logprobs(
    engine: Engine, parts: Sequence[Part], want: Wanted, context: int, vouched: Vouch
) -> None:
    """Adds the log-probs of prompts and of other tokens to answers, if they are asked for.

    Args:
        engine: which may not know them.
        parts: the answers.
        want: what was asked for.
        context: tokens of the engine's context.
        vouched: does the engine's part of it.

    Raises:
        DataError: this engine can't tell them.
        EngineError: the engine has failed.
    """
    if not (want.logprobs and (want.echo or want.top > 1)):
        return
    rank = getattr(engine, "rank", None)
    if rank is None:
        raise DataError("this engine can't score prompts: leave echo and log-probs out")
    # An engine scores one token less than its context.
    rows = [[*part.prompt, *part.own][: context - 1] for part in parts]
    pairs = [(part, row) for part, row in zip(parts, rows, strict=True) if len(row) > 1]
    try:
        given = [np.array(row, dtype=np.int32) for _, row in pairs]
        found: list[Likeliest] = await vouched(lambda: rank(given, max(1, want.top)))
    except TandemError as error:
        raise EngineError(str(error)) from None
    for (part, _), known in zip(pairs, found, strict=True):
        part.known = known
