"""What tests of engines ask of one, and how they wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from tandem.common.records import SamplingParams
from tandem.rollout.engine import FinishedGroup, GroupRequest


def asks(
    group_id: str = "0-0", *, new: int = 24, count: int = 4, temperature: float = 1.0
) -> GroupRequest:
    """Nine prompt tokens."""
    return GroupRequest(
        group_id=group_id,
        prompt_tokens=np.arange(3, 12, dtype=np.int32),
        count=count,
        sampling=SamplingParams(max_new_tokens=new, temperature=temperature, top_p=1.0, top_k=0),
        seed=0,
    )


async def collect(engine: Any, *requests: GroupRequest) -> dict[str, FinishedGroup]:
    """The groups by id."""
    return {group.group_id: group async for group in engine.generate(requests)}


def in_engine(engine: Any, scenario: Callable[[Any], Awaitable[Any]]) -> Any:
    """Starts an engine, lets the scenario use it, closes it."""

    async def run() -> Any:
        await engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), 60)
        finally:
            await engine.close()

    return asyncio.run(run())
