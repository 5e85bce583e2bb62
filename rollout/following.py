"""Keeps an engine on a live run's newest weights without taking part in the run: nothing is leased.

The process is a member of the run with a role of its own, so that people see it, and receives weights as a worker
does. When the run has ended, or its Redis is away, the engine keeps the weights that it has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ..common.config import Config
from ..common.errors import DeadlineError, StoreError, TandemError
from ..common.sockets import CurveKeys
from ..common.weights.protocol import Membership
from ..replay.connection import Store
from ..replay.ledger import Ledger
from ..replay.members import Members
from ..replay.store import RunStore
from .endpoint.plain import EngineError
from .engine import Engine
from .new_weights.receiving import receiving

log = logging.getLogger("tandem.rollout")

T = TypeVar("T")

ROLE = "serve"
BEAT_SECONDS = 2.0
"""Time between two heartbeats."""
FIRST_SECONDS = 600.0
"""How long the run's first weights may take: its learner may still be loading the model."""
AGAIN_SECONDS = 60.0
"""How long weights that failed their check may take to come again."""
LEAVE_SECONDS = 5.0
"""Longest waits for the receiver's end, and for Redis to hear of the process's."""
LOOK_SECONDS = 0.05


class Following:
    """For use in the loop that drives the engine.

    Args:
        config: the run's config.
        name: the member id.
        store: the connection to the run's Redis.
        client: the run's client keys.
        engine: an engine that has been started.
        redis: the one thread that talks to Redis for the loop.
        base: digest of the model that new weights are adapters for; empty if they are a whole model.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        store: Store,
        client: CurveKeys,
        engine: Engine,
        redis: ThreadPoolExecutor,
        base: str,
    ) -> None:
        self._name = name
        self._engine = engine
        self._redis = redis
        self._members = Members(store)
        self._runs = RunStore(store)
        self._changed = asyncio.Event()
        made = receiving(
            Membership(run_id=store.run_id, member=name, registry=self._members, client=client),
            config,
            engine,
            term=Ledger(store, name).term,
            base=base,
            on_change=self._changed.set,
            spoil=self._spoil,
        )
        self._receiver, self._committer, self._check = made.receiver, made.committer, made.check
        self._spoiled = 0
        self._beating: asyncio.Task[None] | None = None

    @property
    def hopeless(self) -> str:
        """Why the process has to end: a version failed its check twice. Empty otherwise."""
        return self._committer.hopeless

    async def start(self) -> None:
        """Joins the run, and returns once the engine has weights of it that pass their check.

        Raises:
            StoreError: Redis can't be reached.
            DeadlineError: no weights have come.
        """
        info = {"pid": os.getpid(), "host": socket.gethostname(), "version": None}
        await self._in_redis(lambda: self._members.register(ROLE, self._name, info))
        self._receiver.start()
        self._beating = asyncio.create_task(self._beat())
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                while self._engine.version is None or self._check.unchecked or self._check.suspect:
                    if self.hopeless:
                        raise TandemError(self.hopeless)
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            raise DeadlineError(
                f"no weights of the run have come within {FIRST_SECONDS:.0f} s: does its learner run? "
                f"`tandem status` says"
            ) from None

    async def freeze(self) -> None:
        """Takes no more weights."""
        # A thread of the receiver's that waits for Redis ends by itself.
        closing = threading.Thread(target=self._receiver.close, daemon=True)
        closing.start()
        end = time.monotonic() + LEAVE_SECONDS
        while closing.is_alive() and time.monotonic() < end:
            await asyncio.sleep(LOOK_SECONDS)

    def _spoil(self) -> None:
        """Has everything under way done again, since it may be of weights that failed their check."""
        self._spoiled += 1

    async def vouch(self, work: Callable[[], Awaitable[T]]) -> T:
        """Result of some work with the engine during which no weights failed their check; until there is one, the
        work is done again.

        Raises:
            EngineError: weights that failed haven't been replaced.
        """
        while True:
            try:
                async with asyncio.timeout(AGAIN_SECONDS):
                    while self._check.suspect:
                        await asyncio.sleep(LOOK_SECONDS)
            except TimeoutError:
                raise EngineError(
                    f"the newest weights have failed their check and haven't come again in {AGAIN_SECONDS:.0f} s"
                ) from None
            before = self._spoiled
            found = await work()
            # It may have been done with weights whose check isn't over.
            if (unchecked := self._check.unchecked) is not None:
                await self._check.settled(versions=[unchecked])
            if self._spoiled == before:
                return found

    async def close(self) -> None:
        """Leaves the run."""
        if self._beating is not None:
            self._beating.cancel()
        await self.freeze()
        try:
            leaving = self._in_redis(lambda: self._members.leave(self._name))
            await asyncio.wait_for(leaving, LEAVE_SECONDS)
        except (StoreError, TimeoutError):
            log.info(f"{self._name} leaves a run whose Redis is away")

    async def _beat(self) -> None:
        """Tells the run that the process lives, and whoever watches it how the run stands."""
        said = ""
        while True:
            version = self._engine.version
            info = {"version": None if version is None else [version.term, version.step]}
            try:
                await self._in_redis(partial(self._members.beat, self._name, info))
                state: str = await self._in_redis(self._runs.state)
            except StoreError:
                state = "away"
            if state != said and state != "running":
                log.warning(f"the run is {state}: serving its weights of version {version}")
            said = state
            await asyncio.sleep(BEAT_SECONDS)

    async def _in_redis(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._redis, call)
