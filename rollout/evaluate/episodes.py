"""Evaluation of problems that are played in environments, in this process: with an endpoint and an environment server of
its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from ...common.config import Config
from ...common.models import load_tokenizer
from ..endpoint.server import Endpoint
from ..engine import Engine
from ..environments.own_server import OwnServer
from ..player import Player

T = TypeVar("T")


@asynccontextmanager
async def playing(engine: Engine, config: Config) -> AsyncIterator[tuple[Player, OwnServer]]:
    """What plays the episodes of a config's environments with an engine that has been started.

    Raises:
        ConfigError: an environment can't be loaded.
    """
    tokenizer: Any = load_tokenizer(config.model.path)
    endpoint = Endpoint(
        engine,
        tokenizer,
        context=config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        model=config.model.path,
        tools=config.environments.tools,
        observation_tokens=config.environments.observation_tokens,
    )
    server = OwnServer(config)
    try:
        await endpoint.start()
        await server.start()
        yield Player(engine, endpoint, server.client, config, tokenizer), server
    finally:
        await server.close()
        await endpoint.close()


async def unless_it_dies(work: asyncio.Task[T], server: OwnServer) -> T:
    """What the work returns.

    Raises:
        TandemError: the server ended before it.
    """
    dying = asyncio.create_task(server.died())
    try:
        await asyncio.wait({work, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            dying.result()
        return await work
    finally:
        for task in (work, dying):
            task.cancel()
        await asyncio.gather(work, dying, return_exceptions=True)
