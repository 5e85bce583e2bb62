"""Samples the turns that requests ask for, and ends those whose clients leave."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from ...common.errors import DataError
from ...common.records import FinishReason, Sample
from ..engine import Engine, GroupRequest
from .live import LiveStream
from .plain import EngineError, Plain, Vouch, sampling_of
from .rendering import Renderer
from .requests import Wanted
from .sessions import NoRoomError, Session, Ticket

log = logging.getLogger("tandem.rollout")

T = TypeVar("T")

ABORT_SECONDS = 30.0
"""How long the engine may take to end a turn at its next token."""
LOOK_SECONDS = 0.005
"""Time between two looks whether it has."""


class Turns:
    """Samples turns with one engine; for use in its loop.

    Args:
        engine: an engine that has been started.
        renderer: knows the texts of special tokens.
        eos: text of the token that ends an answer.
        plain: bounds requests without a session.
        vouch: see :class:`.server.Endpoint`.
    """

    def __init__(
        self, engine: Engine, renderer: Renderer, eos: str | None, plain: Plain, vouch: Vouch | None
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._eos = eos
        self._plain = plain
        self.vouch = vouch
        self._overridden = False

    async def sample(
        self, turns: Sequence[tuple[Session, Ticket]], want: Wanted, live: LiveStream | None
    ) -> list[Sample]:
        """Samples the turns of one request."""

        def one(number: int) -> Coroutine[Any, Any, Sample]:
            follow = None if live is None else live.follow(number)
            # With a seed, equal prompts have equal answers, whatever else a request asks for.
            return self._sample(*turns[number], want, number % want.count, follow)

        async def every() -> list[Sample]:
            if turns[0][0].key:
                return [await one(number) for number in range(len(turns))]
            return await self._plain.together([one(number) for number in range(len(turns))])

        if live is None:
            return await self.vouched(every)
        session, ticket = turns[0]
        ticket.streamed = True

        async def end() -> None:
            ticket.branch.left = not session.is_over
            await self._engine.abort([_names(session, ticket)[0]])

        samples = await live.during(every(), end if session.key else None)
        if ticket.branch.left and samples[0].finish_reason is FinishReason.ABORT:
            # For the episode the turn ended there, as at a stop string.
            return [replace(samples[0], finish_reason=FinishReason.STOP)]
        return samples

    async def vouched(self, work: Callable[[], Awaitable[T]]) -> T:
        """Result of some work with the engine, for which somebody vouches if anybody does."""
        return await (work() if self.vouch is None else self.vouch(work))

    async def _sample(
        self,
        session: Session,
        ticket: Ticket,
        want: Wanted,
        number: int = 0,
        follow: Callable[[Sequence[int]], None] | None = None,
    ) -> Sample:
        """Samples one turn; without a session, the answer to a prompt that has this number.

        Raises:
            DataError: the engine can't sample what was asked for.
            EngineError: the engine couldn't.
        """
        spec = session.spec
        sampling, room = spec.sampling, ticket.room
        if session.key and want.sampling and not self._overridden:
            self._overridden = True
            log.info(
                f"requests in sessions ask for {dict(want.sampling)}; the run's own sampling counts"
            )
        if want.max_tokens is not None:
            room = min(room, want.max_tokens)
        name, noise = _names(session, ticket)
        session.running.add(name)
        sample: Sample | None = None
        error: str | None = None
        refused = False
        try:
            if session.is_over:
                raise NoRoomError("the session is over")
            keyed = not session.key and want.seed is not None
            if not session.key:
                sampling = sampling_of(sampling, want)
            request = GroupRequest(
                group_id=name,
                prompt_tokens=ticket.context,
                count=1,
                sampling=replace(sampling, max_new_tokens=room),
                seed=want.seed if keyed and want.seed is not None else spec.seed,
                noise=f"{number}" if keyed else noise if spec.attempt else None,
                stop=(*spec.stop, *self._stops(want)),
                follow=follow,
            )
            async for group in self._engine.generate([request]):
                error, refused = group.error, group.refused
                sample = group.samples[0] if group.samples else None
        except ValueError as clash:
            error = str(clash)
        finally:
            session.running.discard(name)
            if sample is None:
                session.drop(ticket)
        if refused:
            raise DataError(error)
        if sample is None:
            raise EngineError(error or "the engine gave no answer")
        if sample.finish_reason is FinishReason.ABORT and not len(sample.tokens):
            session.drop(ticket)
            raise NoRoomError("the session was ended before the first token")
        return sample

    def _stops(self, want: Wanted) -> list[str]:
        """The strings that end an answer, without the end token's own text, which ends it in any case: engines
        look for strings at every token."""
        return [
            *(stop for stop in want.stop if stop != self._eos),
            *self._renderer.special_texts(want.stop_tokens),
        ]


def _names(session: Session, ticket: Ticket) -> tuple[str, str]:
    """A turn's name in the engine, and the name that keys its noise."""
    spec = session.spec
    noise = f"{spec.name}/{ticket.order}"
    return f"{spec.name}~{spec.attempt}/{ticket.order}" if spec.attempt else noise, noise


async def settled(session: Session) -> None:
    """Waits for the turns of a session that end because their clients have gone: these may ask on already."""
    end = time.monotonic() + ABORT_SECONDS
    while session.is_left and time.monotonic() < end:
        await asyncio.sleep(LOOK_SECONDS)
