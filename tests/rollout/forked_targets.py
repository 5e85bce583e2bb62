"""What processes of :mod:`forked` do."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tandem.common.config import ModelConfig, RolloutConfig, build
from tandem.common.records import SamplingParams
from tandem.common.run_folder import JoinInfo
from tandem.common.telemetry import start_log
from tandem.launch import cli
from tandem.replay.connection import Store, connect
from tandem.replay.evaluating import evaluations
from tandem.replay.store import RunStore
from tandem.rollout import engines, main, worker
from tandem.rollout.engine import FinishedGroup, GroupRequest


def command(words: Sequence[str]) -> None:
    """A ``tandem`` command."""
    sys.exit(cli.main(words))


def work(join: JoinInfo, name: str, change: Callable[[], None]) -> None:
    """A rollout worker, to which something is changed first."""
    change()
    store = connect(join)
    config = build(yaml.safe_load(RunStore(store).config_yaml()))
    store.close()
    start_log("rollout", "INFO")
    sys.exit(main.main(join, config, name=name, folder=None))


def exhaust(rows: int, tokens: int) -> None:
    """The torch engine with too little memory for so many rows of so many new tokens; it says what comes of it."""
    asyncio.run(_exhaust(rows, tokens))
    # A thread that has found no memory may end the process by a signal at the interpreter's end.
    sys.stdout.flush()
    os._exit(0)


async def _exhaust(rows: int, tokens: int) -> None:
    rollout = RolloutConfig(engine="torch", max_new_tokens=400, group_size=2)
    engine: Any = engines.make_engine(ModelConfig(path="miniature"), rollout, max_rows=rows)
    await engine.start()
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=tokens)
    prompt = np.full(20, 5, np.int32)

    async def generate(name: str, count: int) -> list[FinishedGroup]:
        request = GroupRequest(
            group_id=name, prompt_tokens=prompt, count=count, sampling=sampling, seed=1
        )
        return [group async for group in engine.generate([request])]

    await generate("first", 2)
    assert engine.exhausted is None
    found = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    held = int(found[1]) << 10
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + (64 << 20), limits[1]))
    (group,) = await generate("second", rows)
    # In one piece each, since the engine's thread writes to the same file.
    sys.stdout.write(f"error: {group.error}\n")
    async with asyncio.timeout(20):
        while engine.exhausted is None:  # The group is given up a moment before.
            await asyncio.sleep(0.01)
    exhausted = engine.exhausted
    parts = sorted(exhausted.parts)
    sys.stdout.write(f"told: {type(exhausted).__name__} {parts} {exhausted}\n")


# What a test may change in a worker.


def unchanged() -> None:
    """The worker as it is."""


def impatient() -> None:
    """It ends after a second without Redis."""
    for method in Store.script, Store.put, Store.call, Store.batch:
        assert method.__kwdefaults__ is not None
        method.__kwdefaults__["deadline"] = 0.5
    worker.OUTAGE_SECONDS = 1.0


def retries_soon() -> None:
    """An evaluation that has failed is tried again after 0.2 s instead of two seconds."""
    evaluations.FAILED_SECONDS = 0.2
