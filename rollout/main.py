"""Starts a rollout worker: its connection, its engine, and then its work."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..common.adapters import base_of
from ..common.config import Config
from ..common.errors import OutOfMemoryError, TandemError
from ..common.run_folder import JoinInfo, RunFolder
from ..replay.connection import connect
from ..replay.store import RunStore
from .engines import load_engine, make_engine
from .worker import Worker

log = logging.getLogger("tandem.rollout")

SWITCH_SECONDS = 0.0005
"""How long a thread may hold the interpreter while the decode thread waits for it."""


def main(join: JoinInfo, config: Config, *, name: str, folder: RunFolder | None) -> int:
    """Works until the run has ended or SIGTERM asks it to drain; returns the exit status."""
    import torch

    # Must be set before any parallel work, which fixes it.
    torch.set_num_threads(config.rollout.threads)
    torch.set_num_interop_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        return asyncio.run(_main(join, config, name))
    except OutOfMemoryError:
        raise  # Whoever started this role knows what can help.
    except TandemError as error:
        log.error(str(error))
        return error.exit_code


def load(config: Config) -> None:
    """Loads the libraries that :func:`main` will need."""
    load_engine(config.model, config.rollout)


async def _main(join: JoinInfo, config: Config, name: str) -> int:
    """Connects, starts an engine, and works."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    redis = ThreadPoolExecutor(1, thread_name_prefix="redis")
    try:
        store = await loop.run_in_executor(redis, lambda: connect(join, name=name))
        client = await loop.run_in_executor(redis, RunStore(store).curve_client)
        # Loading a large model takes minutes, in which the loop must hear of SIGTERM.
        engine = await asyncio.to_thread(
            make_engine,
            config.model,
            config.rollout,
            max_prompt_tokens=config.data.max_prompt_tokens,
            lora=config.learner.lora,
            # Samples of the newest version, of those that are not too old yet, and one in between.
            versions=config.replay.max_staleness + 2,
            shares_gpu=config.launch.share_gpu,
        )
        # The engine has fetched the model by now, if it comes from a hub.
        base = await asyncio.to_thread(base_of, config.model, config.learner.lora)
        # vLLM takes half a minute to start, and a large model takes minutes.
        if not await unless_stopped(engine.start(), stop):
            log.info(f"{name} was asked to end before its engine was ready")
            return 0
        return await Worker(config, name, store, client, engine, stop, redis, base).run()
    finally:
        redis.shutdown(wait=False, cancel_futures=True)


async def unless_stopped(start: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Awaits a start, and ends it where SIGTERM comes first; then returns False."""
    starting = asyncio.create_task(start)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        starting.result()
        return True
    starting.cancel()
    await asyncio.wait({starting})
    return False
