"""What tests of the endpoint have in common: bounds of sessions, a tool, and a deadline."""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.common.records import SamplingParams
from tandem.rollout.endpoint.sessions import SessionSpec

CONTEXT = 4096
RUN_KEY = "the-run's-own-key"


def sampling(**changes: Any) -> SamplingParams:
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 24}
    return SamplingParams(**{**given, **changes})


def spec(name: str = "g#0", **changes: Any) -> SessionSpec:
    given = {
        "name": name,
        "sampling": sampling(),
        "seed": 3,
        "longest": CONTEXT,
        "max_turns": 1000,
    }
    return SessionSpec(**{**given, **changes})


def tool(name: str = "multiply") -> dict[str, Any]:
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    about = {"name": name, "description": "Multiplies.", "parameters": parameters}
    return {"type": "function", "function": about}


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 110))
