"""Serves one engine's endpoint until somebody ends it: with a folder's weights, or with a run's newest ones."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from ..common.adapters import base_of
from ..common.config import Config
from ..common.errors import TandemError
from ..common.models import load_tokenizer
from ..common.run_folder import JoinInfo
from ..replay.connection import connect
from ..replay.store import RunStore
from .endpoint.plain import Limits
from .endpoint.server import Endpoint
from .engine import Engine
from .engines import make_engine
from .following import Following
from .main import SWITCH_SECONDS, unless_stopped
from .worker import EXIT_UNLIKE

log = logging.getLogger("tandem.rollout")

LOOK_SECONDS = 0.5
"""Time between two looks whether the engine still works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served, and to whom."""

    config: Config
    """Model, engine, and the tokens of the longest prompt and response."""
    host: str
    port: int
    key: str
    """The clients' key; empty = anyone who can reach the address may ask."""
    limits: Limits
    join: JoinInfo | None = None
    """The run whose newest weights are served; None = the model's own."""
    freeze: bool = False
    """Whether the run's weights stay those that were the newest at the beginning."""


def serve(serving: Serving, ready: Callable[[str], None]) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit status.

    Args:
        serving: what.
        ready: called with the endpoint's address once it listens.

    Raises:
        TandemError: the model can't be loaded, the address is taken, the run can't be joined, or the engine has
            failed.
    """
    import torch

    torch.set_num_threads(serving.config.rollout.threads)
    torch.set_num_interop_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    return asyncio.run(_serve(serving, ready))


async def _serve(serving: Serving, ready: Callable[[str], None]) -> int:
    config = serving.config
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end(number: signal.Signals) -> None:
        stop.set()
        # The second one ends the process wherever it is.
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, partial(end, number))
    async with AsyncExitStack() as stack:
        engine = await asyncio.to_thread(
            make_engine,
            config.model,
            config.rollout,
            max_prompt_tokens=config.data.max_prompt_tokens,
            lora=config.learner.lora if serving.join is not None else None,
        )
        stack.push_async_callback(engine.close)
        if not await unless_stopped(engine.start(), stop):
            return 0
        follows = None
        if serving.join is not None:
            follows = await _join(serving, engine, stack)
            if not await unless_stopped(follows.start(), stop):
                return 0
            if serving.freeze:
                await follows.freeze()
        context = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        endpoint = Endpoint(
            engine,
            load_tokenizer(config.model.path),
            context=min(context, getattr(engine, "context", context)),
            model=config.model.path,
            host=serving.host,
            port=serving.port,
            port_setting="--port",
            key=serving.key,
            anyone=not serving.key,
            limits=serving.limits,
            vouch=None if follows is None else follows.vouch,
        )
        await endpoint.start()
        stack.push_async_callback(endpoint.close)
        ready(endpoint.url)
        return await _until(stop, engine, follows)


async def _join(serving: Serving, engine: Engine, stack: AsyncExitStack) -> Following:
    """Connects to the run."""
    assert serving.join is not None
    config, name = serving.config, f"serve-{socket.gethostname()}-{os.getpid()}"
    redis = ThreadPoolExecutor(1, thread_name_prefix="redis")
    stack.callback(redis.shutdown, wait=False, cancel_futures=True)
    loop = asyncio.get_running_loop()
    store = await loop.run_in_executor(redis, partial(connect, serving.join, name=name))
    client = await loop.run_in_executor(redis, RunStore(store).curve_client)
    base = await asyncio.to_thread(base_of, config.model, config.learner.lora)
    follows = Following(config, name, store, client, engine, redis, base)
    stack.push_async_callback(follows.close)
    return follows


async def _until(stop: asyncio.Event, engine: Engine, follows: Following | None) -> int:
    """Waits for the end; returns the exit status.

    Raises:
        TandemError: the engine has failed.
    """
    while not stop.is_set():
        if exhausted := getattr(engine, "exhausted", None):
            raise exhausted
        if broken := getattr(engine, "broken", ""):
            raise TandemError(f"the engine has failed: {broken}")
        # Last: an engine that has failed fails the check of its weights, too.
        if follows is not None and follows.hopeless:
            log.error(follows.hopeless)
            return EXIT_UNLIKE
        try:
            await asyncio.wait_for(stop.wait(), LOOK_SECONDS)
        except TimeoutError:
            pass
    return 0
