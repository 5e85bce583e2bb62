"""Sessions, tools and clients for the tests of the endpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.common.records import FinishReason, Sample, SamplingParams, VersionSpan
from tandem.rollout.endpoint.server import Endpoint
from tandem.rollout.endpoint.sessions import Session, SessionSpec

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


def planted(tokens: list[int], text: str) -> Sample:
    """A turn that the policy is taken to have written and ended."""
    return Sample(
        tokens=np.array(tokens, dtype=np.int32),
        source=np.zeros(len(tokens), np.uint8),
        logprobs=np.full(len(tokens), -0.1, np.float32),
        spans=(VersionSpan(term=1, step=0, start=0, end=len(tokens)),),
        finish_reason=FinishReason.STOP,
        text=text,
        sampling=sampling(),
        reward=None,
        components={},
        verdict=None,
        extracted=None,
        grader=None,
    )


def tool(name: str = "multiply") -> dict[str, Any]:
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    about = {"name": name, "description": "Multiplies.", "parameters": parameters}
    return {"type": "function", "function": about}


@dataclass(slots=True)
class Served:
    """An endpoint that listens."""

    endpoint: Endpoint
    engine: Any
    model: Any
    tokenizer: Any

    def open(self, name: str = "g#0", **changes: Any) -> Session:
        return self.endpoint.open(spec(name, **changes))

    def client(self, session: Session) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=session.base_url, api_key="unused", max_retries=0, timeout=60)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 110))
